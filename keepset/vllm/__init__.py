"""The plug-in for vLLM, which compresses the paged cache in place."""

from keepset.vllm.settings import engine_args, serve_options

__all__ = ["engine_args", "serve_options"]
