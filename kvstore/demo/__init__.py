"""A fact hidden in a long text, asked for with full attention and with a store that reads a share of the rows."""
