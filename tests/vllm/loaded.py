"""vLLM, with all that engines need of it; and what each engine would do once more to the whole process is done here."""

from __future__ import annotations

import gc
import os

from tests import imports

if gc.isenabled():
    imports.begin()

if os.environ.get("KEEPSET_TYPECHECK", "1") == "1":
    from tests import typecheck

    typecheck.install()

if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
    # That runner prepares a step's tensors by kernels of Triton, for which vLLM's build for CPUs knows no compiler. So
    # Triton's interpreter takes its place before anything of vLLM is imported that defines kernels.
    os.environ["TRITON_INTERPRET"] = "1"
    import triton
    from triton import language
    from triton.language.extra import libdevice
    from vllm import triton_utils
    from vllm.triton_utils import importing

    importing.HAS_TRITON = triton_utils.HAS_TRITON = True
    triton_utils.triton, triton_utils.tl, triton_utils.tldevice = triton, language, libdevice

from vllm import LLM, SamplingParams  # noqa: F401
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.model_executor.models import llama, registry  # noqa: F401
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends import cpu_attn  # noqa: F401
from vllm.v1.engine import core
from vllm.v1.executor import multiproc_executor  # noqa: F401
from vllm.v1.worker import cpu_worker, gpu_worker  # noqa: F401

from tests.paged import methods
from tests.vllm import job  # noqa: F401

methods.register()
# Processes that wait for one another would each keep a core busy.
poll = SpinCondition.wait


def wait(condition: SpinCondition, timeout_ms: int | None = None) -> None:
    """Wait for a moment: a message may come before anybody listens."""
    condition.busy_loop_s = 0
    poll(condition, min(2, 2 if timeout_ms is None else timeout_ms))


SpinCondition.wait = wait  # type: ignore[method-assign]
# It looks at the class of each kind of model in a process of its own, which would import vLLM for it.
registry._run_in_subprocess = lambda look: look()
# A search through all names of all modules for kernels to replace.
CpuPlatform.register_triton_kernel_overrides()
CpuPlatform.register_triton_kernel_overrides = lambda _: None
# Nothing that has been imported is garbage: to look through it takes longer than an engine's start.
imports.end()
gc.unfreeze = core.freeze_gc_heap = gpu_worker.freeze_gc_heap = lambda: None
