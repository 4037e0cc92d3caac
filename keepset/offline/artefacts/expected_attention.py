"""Expected Attention's statistics (arXiv:2510.00636), as kvpress' `ExpectedAttentionStats` writes them: safetensors.

Tensors are `query_mean`, `[layers, query_heads, head_dim]`, and `query_cov`, `[layers, query_heads, head_dim,
head_dim]`, of queries before rotation. The config says over which texts, and how many first tokens were left out.
"""

from __future__ import annotations

from keepset.offline.artefacts.artefact import Artefact, Found

_SAID = ("dataset_name", "num_samples", "sample_seq_len", "n_sink")


def read(found: Found) -> Artefact | None:
    """Return mean and covariance; None if what was found is something else."""
    if set(found.tensors) != {"query_mean", "query_cov"}:
        return None
    fields = {"mean": found.tensors["query_mean"].float(), "covariance": found.tensors["query_cov"].float()}
    made = {name: found.config[name] for name in _SAID if isinstance(found.config.get(name), str | int)}
    return Artefact("Expected Attention", fields=fields, made=made)
