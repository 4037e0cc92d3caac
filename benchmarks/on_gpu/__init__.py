"""What `gpu.py` measures, part by part."""
