"""Sweeps: every recipe on every example of a benchmark, in a file that can be gone on with."""
