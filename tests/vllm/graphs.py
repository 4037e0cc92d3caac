"""Pretended CUDA graphs: what a forward launches is noted while it is captured, and launched again in its place.

Everything is noted as a device would: operators and stand-ins for kernels, on the very tensors that they got. A replay
calls no layer and no model, so that whatever is decided there in Python is decided once. vLLM's own dispatcher says
which steps are replayed, and fills them up to the sizes that were captured.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tests.vllm import kernels

SIZES = [1, 2, 4, 8]


class Graph(TorchDispatchMode):
    """What is launched while it is active."""

    active: Graph | None = None

    def __init__(self) -> None:
        super().__init__()
        self._launches: list[tuple[Callable[[], Any], list[Tensor | None]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "vllm":  # an operator in Python, which calls what is to be noted
            from vllm.model_executor.layers.attention import attention

            with self:
                return getattr(attention, function.overloadpacket.__name__)(*args, **(kwargs or {}))
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
    """Those of a model runner.

    Attributes:
        replays: steps that were.
        calls: of the model otherwise, since the graphs were captured.
    """

    def __init__(self, runner: Any) -> None:
        from vllm.config import CUDAGraphMode
        from vllm.forward_context import get_forward_context

        self._graphs: dict[int, tuple[Graph, Any, list[tuple[int, int]]]] = {}
        self.replays, self.calls = 0, 0
        forward = runner.model.forward

        def run(**inputs: Any) -> Any:
            context = get_forward_context()
            if context.cudagraph_runtime_mode != CUDAGraphMode.FULL:
                self.calls += 1
                return forward(**inputs)
            size, told = context.batch_descriptor.num_tokens, list(context.attn_metadata.values())
            addresses = [_addresses(one) for one in told]
            if size not in self._graphs:
                graph = Graph.active = Graph()
                with graph:
                    output = forward(**inputs)
                Graph.active = None
                self._graphs[size] = graph, output, addresses
                return output
            graph, output, captured = self._graphs[size]
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
        assert sorted(self._graphs) == SIZES


def _addresses(told: Any) -> tuple[int, ...]:
    """Where an attention layer looks: of FlashInfer what has been planned for it."""
    if hasattr(told, "block_table"):
        return told.block_table.data_ptr(), told.seq_lens.data_ptr()
    return (id(told.decode.wrapper),)


def use(backend: str | None) -> None:
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
    places: list[tuple[Any, str]] = [(attention, "append_to_pages"), (attention, "paged_attention")]
    if backend == "FLASHINFER":
        from vllm.v1.attention.backends import flashinfer  # not even there to be imported, if it is not pretended

        places += [(kernels.Wrapper, "run"), (flashinfer.FlashInferImpl, "do_kv_cache_update")]
    else:
        places += [(flash_attn, "_FA4_DENSE_ATTENTION_KERNEL"), (flash_attn, "reshape_and_cache_flash")]
        places += [(triton_attn, "unified_attention"), (triton_attn, "triton_reshape_and_cache_flash")]
    for module, name in places:
        setattr(module, name, _noted(getattr(module, name)))
