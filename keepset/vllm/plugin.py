"""The plug-in's entry point, which registers keepset's classes. Without a recipe vLLM uses its own."""

from __future__ import annotations


def register() -> None:
    """Register keepset's backends. vLLM calls this in each of its processes."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, MambaAttentionBackendEnum, register_backend
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

    from keepset.vllm import stats

    stats.name_folder()
    stats.expose()
    # vLLM registers its own kinds of cache only while none is registered, so they must come first.
    register_all_kvcache_specs(None)
    for backend in AttentionBackendEnum:
        if backend.value and not backend.is_overridden():
            register_backend(backend, f"keepset.vllm.backends.{backend.name}")
    for recurrent in MambaAttentionBackendEnum:
        if recurrent.value and not recurrent.is_overridden():
            register_backend(recurrent, f"keepset.vllm.backends.{recurrent.name}", is_mamba=True)
