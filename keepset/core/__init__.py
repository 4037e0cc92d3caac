"""The types that everything hangs on: what a method sees, and what it answers."""
