"""Evaluation of recipes: fidelity on a text, benchmarks, latency; and the choice of a recipe for a text."""
