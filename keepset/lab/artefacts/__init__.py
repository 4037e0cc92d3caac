"""Artefacts that others have published for a model, read from their authors' files."""
