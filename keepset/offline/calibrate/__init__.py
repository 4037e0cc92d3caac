"""Measuring, once and beforehand, what some methods look at: statistics of a model's queries over texts."""
