"""Sweeps: every recipe on every example of a benchmark, in a file from which a stopped sweep can continue."""
