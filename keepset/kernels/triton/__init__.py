"""The kernels in Triton: each has a plain counterpart in PyTorch of the same name, one folder up."""
