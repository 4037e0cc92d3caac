"""Compression in paged caches for any engine; this package imports none."""
