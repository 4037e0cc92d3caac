"""Triton's interpreter in place of its compiler, so that vLLM's model runner V2 runs on a CPU.

That runner prepares a step's tensors by kernels of Triton, and vLLM's build for CPUs knows no compiler for them.
"""

from __future__ import annotations

import os
from typing import Any


def install() -> None:
    """Before anything of vLLM is imported that defines kernels."""
    os.environ["TRITON_INTERPRET"] = "1"
    import triton
    import vllm.platforms  # noqa: F401
    from triton import language
    from triton.language.extra import libdevice
    from vllm import triton_utils
    from vllm.triton_utils import importing

    importing.HAS_TRITON = triton_utils.HAS_TRITON = True
    triton_utils.triton, triton_utils.tl, triton_utils.tldevice = triton, language, libdevice


def warm_up(worker: Any) -> None:
    """Do what the worker for GPUs does before the first request: a run without requests, and some with made-up ones."""
    from vllm.v1.worker.gpu.warmup import run_mixed_prefill_decode_warmup

    runner = worker.model_runner
    runner._dummy_run(runner.max_num_tokens)
    run_mixed_prefill_decode_warmup(runner, worker.execute_model, worker.sample_tokens, runner.max_num_tokens)
