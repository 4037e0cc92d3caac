"""Measurements of a model that are made once, beforehand."""
