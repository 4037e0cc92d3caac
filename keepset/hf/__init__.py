"""The transformers runtime: an attention function, a cache, and what they see for methods."""
