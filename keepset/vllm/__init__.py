"""The plug-in for vLLM: its paged cache, compressed where it lies."""
