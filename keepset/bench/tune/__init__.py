"""Finding the recipe for a text by measuring."""
