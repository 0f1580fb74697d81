"""The pool of block frames on the device."""
