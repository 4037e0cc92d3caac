"""Fidelity to the full cache: recipes on one text, after a prompt and while decoding."""
