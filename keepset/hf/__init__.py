"""The transformers runtime: an attention function, a cache, and the observation of both for methods."""
