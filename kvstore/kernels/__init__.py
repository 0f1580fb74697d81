"""Numba kernels over rows where they lie."""
