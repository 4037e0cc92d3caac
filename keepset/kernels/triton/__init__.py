"""The Triton kernels: each has a PyTorch counterpart of the same name, one folder up."""
