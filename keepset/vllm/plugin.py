"""The plug-in's entry point: tells vLLM where keepset's classes are. Without a recipe vLLM stays as it is."""

from __future__ import annotations


def register() -> None:
    """Called by vLLM in each of its processes."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

    from keepset.vllm import stats

    stats.name_folder()
    stats.expose()
    # vLLM registers its own kinds of cache only while none is registered, so they must come first.
    register_all_kvcache_specs(None)
    for backend in AttentionBackendEnum:
        if backend.value and not backend.is_overridden():
            register_backend(backend, f"keepset.vllm.backends.{backend.name}")
