"""Compression in paged caches, whatever the engine: nothing here imports one."""
