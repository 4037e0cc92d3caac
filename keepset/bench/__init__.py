"""What recipes are worth: fidelity to the full cache on a text."""
