"""Sweeps: what every recipe makes of every example of a benchmark, in a file that goes on where it was stopped."""
