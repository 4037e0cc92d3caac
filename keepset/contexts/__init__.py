"""Saved contexts as files: their format and its checks, and what identifies a model and a text."""
