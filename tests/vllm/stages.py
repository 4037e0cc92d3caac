"""Pipeline stages on CPUs: what vLLM's eager CPU workers leave out.

A stage's input is allocated in a model's dummy run, with which these do not begin. Each worker imports this module as
its extension, and allocates it when the model is loaded.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed import get_pp_group
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


class WorkerExtension:
    """Nothing but this module."""


_load_model = CPUModelRunner.load_model


def _load_and_allocate(runner: Any, *args: Any, **kwargs: Any) -> None:
    _load_model(runner, *args, **kwargs)
    if not get_pp_group().is_first_rank:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


CPUModelRunner.load_model = _load_and_allocate
