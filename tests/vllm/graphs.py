"""Pretended CUDA graphs: what a forward launches is noted while it is captured, and launched again in its place.

Everything is noted as a device would: operators and stand-ins for kernels, on the very tensors that they got. A replay
calls no layer and no model, so that whatever is decided there in Python is decided once. vLLM's own dispatcher says
which steps are replayed, and fills them up to the sizes that were captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tests.vllm import kernels

SIZES = [1, 2, 4, 8]


class Graph(TorchDispatchMode):
    """Everything that is launched while it is active."""

    active: Graph | None = None

    def __init__(self) -> None:
        super().__init__()
        self._launches: list[tuple[Callable[[], Any], list[Tensor | None]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "vllm":  # an operator in Python, which calls what is to be noted
            from vllm.model_executor.layers.attention import attention, mla_attention

            name = function.overloadpacket.__name__
            with self:
                return getattr(mla_attention if "mla" in name else attention, name)(*args, **(kwargs or {}))
        launch = partial(function, *args, **(kwargs or {}))
        output = launch()
        known = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        made = [leaf if _storage(leaf) not in known else None for leaf in _tensors(output)]
        if any(leaf is not None for leaf in made) or function._schema.is_mutable:  # else it is a view
            self._launches.append((launch, made))
        return output

    def note(self, kernel: Callable[[], Any]) -> None:
        """A kernel was launched, which makes no tensors."""
        self._launches.append((kernel, []))

    def replay(self) -> None:
        """Launches all of it again; what were new tensors then are filled anew."""
        for launch, made in self._launches:
            for there, again in zip(made, _tensors(launch()), strict=False):
                if there is not None:
                    there.copy_(again)


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _noted(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A stand-in for a kernel, which looks at numbers whenever it runs, be it for the first time or again."""

    def launch(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            output = kernel(*args, **kwargs)
        if Graph.active is not None:
            Graph.active.note(partial(kernel, *args, **kwargs))
        return output

    return launch


class Graphs:
    """The captured graphs of a model runner."""

    def __init__(self, runner: Any, runner_v2: bool) -> None:
        self.replays, self.calls = 0, 0
        (self._capture_v2 if runner_v2 else self._capture)(runner)

    def _capture(self, runner: Any) -> None:
        from vllm.config import CUDAGraphMode
        from vllm.forward_context import get_forward_context

        graphs: dict[int, tuple[Graph, Any, list[tuple[int, ...]]]] = {}
        forward = runner.model.forward

        def run(**inputs: Any) -> Any:
            context = get_forward_context()
            if context.cudagraph_runtime_mode != CUDAGraphMode.FULL:
                self.calls += 1
                return forward(**inputs)
            size, told = context.batch_descriptor.num_tokens, list(context.attn_metadata.values())
            addresses = [_addresses(one) for one in told]
            if size not in graphs:
                graph = Graph.active = Graph()
                with graph:
                    output = forward(**inputs)
                Graph.active = None
                graphs[size] = graph, output, addresses
                return output
            graph, output, captured = graphs[size]
            assert addresses == captured
            graph.replay()
            self.replays += 1
            return output

        if not runner.compilation_config.cudagraph_mode.has_full_cudagraphs():
            return  # what the attention backend says of graphs has decided
        runner.model.forward = run
        for size in reversed(SIZES):
            runner._dummy_run(
                size, cudagraph_runtime_mode=CUDAGraphMode.FULL, uniform_decode=True, is_graph_capturing=True
            )
        assert sorted(graphs) == SIZES

    def _capture_v2(self, runner: Any) -> None:
        """Capture as the runner itself does, which knows its graphs: a replay is no forward there."""
        from vllm.config import CUDAGraphMode

        manager, state, addresses = runner.cudagraph_manager, runner.model_state, {}
        if not manager.cudagraph_mode.has_full_cudagraphs():
            return
        forward, prepare, replay = runner.model.forward, state.prepare_attn, manager.run_fullgraph

        def prepared(batch: Any, mode: Any, *args: Any, for_capture: bool = False, **more: Any) -> Any:
            told = prepare(batch, mode, *args, for_capture=for_capture, **more)
            there = [_addresses(one) for one in told.values()]
            if for_capture:
                addresses[batch.num_tokens_after_padding] = there
            elif mode == CUDAGraphMode.FULL:
                assert addresses[batch.num_tokens_after_padding] == there
            return told

        def replayed(batch: Any) -> Any:
            self.replays += 1
            return replay(batch)

        def called(**inputs: Any) -> Any:
            self.calls += 1
            return forward(**inputs)

        state.prepare_attn = prepared
        runner.capture_model()
        assert manager.captured_token_counts() == SIZES
        manager.run_fullgraph, runner.model.forward = replayed, called


def _addresses(told: Any) -> tuple[int, ...]:
    """The addresses that an attention layer reads; for FlashInfer, its plan."""
    told = told if hasattr(told, "block_table") or hasattr(told.decode, "wrapper") else told.decode
    if hasattr(told, "block_table"):
        return told.block_table.data_ptr(), told.seq_lens.data_ptr()
    return (id(told.decode.wrapper),)


@contextmanager
def _captured(graph: Graph, *args: Any, **more: Any) -> Iterator[None]:
    """`torch.cuda.graph`."""
    Graph.active = graph
    with graph:
        yield
    Graph.active = None


def _use_v2() -> None:
    """Replace what model runner V2 captures with."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker.gpu import cudagraph_utils, model_runner

    cudagraph_utils.capture_pool = cudagraph_utils.graph_capture = lambda *args, **more: nullcontext()
    cudagraph_utils.current_stream = lambda: None
    CpuPlatform.get_global_graph_pool = CpuPlatform.graph_pool_handle = lambda self: None
    torch.cuda.CUDAGraph, torch.cuda.graph = Graph, _captured
    torch.accelerator.empty_cache = lambda: None
    torch.accelerator.get_memory_info = lambda *args: (0, 0)
    model_runner.freeze_gc_for_cudagraph_capture, model_runner.lock_workspace = nullcontext, lambda: None


def _measure_first(runner_v2: bool) -> None:
    """A worker for GPUs captures some graphs over a smallest cache, to know what is left for the real one."""
    from vllm.config import CUDAGraphMode, set_current_vllm_config
    from vllm.v1.worker.cpu_worker import CPUWorker

    determine = CPUWorker.determine_available_memory

    def measured(worker: Any) -> int:
        runner, config = worker.model_runner, worker.vllm_config
        if runner_v2:
            runner.profile_cudagraph_memory()
        else:
            with torch.inference_mode(), set_current_vllm_config(config):
                runner._init_minimal_kv_cache_for_profiling()
                for size in SIZES[:1:-1]:
                    runner._dummy_run(
                        size,
                        cudagraph_runtime_mode=CUDAGraphMode.FULL,
                        uniform_decode=True,
                        is_graph_capturing=True,
                        profile_seq_lens=config.model_config.max_model_len,
                    )
                runner._cleanup_profiling_kv_cache()
        return determine(worker)

    CPUWorker.determine_available_memory = measured


def use(backend: str | None, runner_v2: bool) -> None:
    """Engines that are built from now on are to capture what decodes."""
    from vllm.config import CUDAGraphMode
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends import flash_attn, triton_attn

    from keepset.vllm import attention

    check = CpuPlatform.check_and_update_config.__func__

    def checked(cls: Any, config: Any) -> None:
        check(cls, config)
        compilation = config.compilation_config
        compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
        compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = list(SIZES), SIZES[-1]
        compilation.post_init_cudagraph_sizes()

    CpuPlatform.check_and_update_config = classmethod(checked)
    if runner_v2:
        _use_v2()
    _measure_first(runner_v2)
    places: list[tuple[Any, str]] = [(attention, "append_to_pages"), (attention, "paged_attention")]
    if backend == "FLASHINFER":
        from vllm.v1.attention.backends import flashinfer  # not even there to be imported, if it is not pretended

        places += [(kernels.Wrapper, "run"), (flashinfer.FlashInferImpl, "do_kv_cache_update")]
    elif backend == "TRITON_MLA":
        from vllm import _custom_ops
        from vllm.v1.attention.backends.mla import triton_mla

        from keepset.vllm import latents

        places = [(latents, "append_to_pages"), (latents, "paged_attention")]
        places += [(triton_mla, "decode_attention_fwd"), (_custom_ops, "concat_and_cache_mla")]
    else:
        places += [(flash_attn, "_FA4_DENSE_ATTENTION_KERNEL"), (flash_attn, "reshape_and_cache_flash")]
        places += [(triton_attn, "unified_attention"), (triton_attn, "triton_reshape_and_cache_flash")]
        places += [(triton_attn, "triton_reshape_and_cache_flash_per_token_head_quant")]
    for module, name in places:
        setattr(module, name, _noted(getattr(module, name)))
