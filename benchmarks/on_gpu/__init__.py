"""The parts of `gpu.py`'s measurement."""
