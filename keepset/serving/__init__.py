"""vLLM servers: their command line, their HTTP interface, and benchmarks by `vllm bench serve`."""
