"""The runtimes' kernels: attention over ragged stores, streamed statistics of attention."""
