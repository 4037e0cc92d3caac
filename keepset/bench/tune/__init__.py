"""The recipe for a text, found by measuring."""
