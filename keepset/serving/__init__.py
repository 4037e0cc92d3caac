"""vLLM servers: their command line, their HTTP interface, and `vllm bench serve` on them."""
