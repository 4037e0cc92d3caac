"""Statistics of a model's queries over texts, which some methods need."""
