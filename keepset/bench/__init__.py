"""What recipes are worth: fidelity on a text, benchmarks, latency; and the recipe that suits a text."""
