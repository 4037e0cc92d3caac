"""Measurements of a model that are made once, before it is used."""
