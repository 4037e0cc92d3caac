"""Artefacts that others have published for a model, read from files as their authors write them."""
