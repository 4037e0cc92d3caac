"""vLLM servers: their command line, and their HTTP interface."""
