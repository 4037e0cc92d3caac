"""Serving with vLLM: the command line of a server, and a load generator that measures one over HTTP."""
