"""Benchmarks: one module a question, each beside its peers in one run. See README.md."""
