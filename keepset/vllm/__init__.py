"""The plug-in for vLLM: its paged cache, compressed where it lies."""

from keepset.vllm.engine_args import engine_args, serve_options

__all__ = ["engine_args", "serve_options"]
