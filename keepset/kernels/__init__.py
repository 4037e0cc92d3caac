"""The numeric work of the runtimes: attention over ragged stores, streamed statistics of attention."""
