"""`PromptCache`: the part of a cache that watches a prompt pass and makes Observations of it."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from jaxtyping import Bool
from torch import Tensor, nn
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import DynamicCache, DynamicLayer

from keepset.core.observation import Observation
from keepset.core.schedule import Schedule
from keepset.core.statistics import Statistics, load
from keepset.errors import KeepsetError
from keepset.hf import attention
from keepset.hf.attention_hooks import AttentionHooks, LayerInput, Rotation
from keepset.hf.layer import KeepLayer
from keepset.hf.perplexity import Perplexity
from keepset.hf.second_pass import SecondPasses
from keepset.hf.support import check_model

if TYPE_CHECKING:
    import transformers


class PromptCache(TransformersCache, ABC):
    """A transformers cache whose growing layers are keepset's; a subclass says what becomes of a prompt.

    Attributes:
        needs: what its layers collect while the prompt runs.
        statistics: those of the model that are needed, by the files that hold them.
        schedule: when its layers are observed.
        compressed_layers: indices of the layers that may be compressed; others, such as sliding windows,
            stay transformers' own.
    """

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        needs: Needs,
        prompt_length: int | None = None,
        schedule: Schedule | None = None,
        tasks: Sequence[Tensor] = (),
    ) -> None:
        if prompt_length is not None and prompt_length < 1:
            raise KeepsetError(f"prompt_length={prompt_length} is not a number of tokens: use an integer from 1.")
        config = model.config.get_text_config(decoder=True)
        check_model(model, config)
        model.set_attn_implementation(attention.NAME)

        # transformers decides each layer's kind; only those that would grow without end are replaced.
        layers = DynamicCache(config=config).layers
        self.kept_layers = {
            index: KeepLayer(self, index) for index, layer in enumerate(layers) if type(layer) is DynamicLayer
        }
        if not self.kept_layers:
            warnings.warn(
                f"Every layer of {type(model).__name__} has a window of its own: keepset compresses nothing.",
                stacklevel=3,
            )
        super().__init__(layers=[self.kept_layers.get(index, layer) for index, layer in enumerate(layers)])
        self.needs, self.schedule = needs, schedule or Schedule()
        wanted = needs.statistics if self.kept_layers else ()
        self.statistics: Mapping[str, Statistics] = {
            file: load(file, model.config.name_or_path or "") for file in wanted
        }
        self.prompt_length = prompt_length
        self.compressed_layers = tuple(self.kept_layers)
        self._tap = AttentionHooks(model) if needs.hidden_states else None
        again = needs.second_passes and self.kept_layers
        self._second = SecondPasses(model, self, needs, tasks) if again else None
        foretold = needs.perplexity and self.kept_layers
        self._perplexity = Perplexity(model, self, needs.perplexity) if foretold else None
        self._waiting: list[tuple[KeepLayer, Observation]] = []
        self._attending = False

    @property
    def nbytes(self) -> int:
        """Bytes allocated, those of layers that keepset leaves alone included."""
        return sum(layer.nbytes if isinstance(layer, KeepLayer) else _nbytes(layer) for layer in self.layers)

    def reset(self) -> None:
        """Forgets everything that was cached; another prompt may follow."""
        super().reset()
        self._attending = False
        if self._tap is not None:
            self._tap.open()
        if self._second is not None:
            self._second.open()
        self._waiting.clear()
        if self._perplexity is not None:
            self._perplexity.close()
            self._perplexity.open()

    def activate_past_recording(self) -> None:
        """What transformers calls before assisted generation, which drafts tokens with the prompt."""
        if self.schedule.every is not None:
            raise KeepsetError(
                "Assisted generation cannot go with compression while decoding (every=...), because its drafted "
                "tokens would be compressed before they are accepted: leave one of them out."
            )
        if self.prompt_length is None and any(layer.compressed_at is None for layer in self.kept_layers.values()):
            raise KeepsetError(
                "Assisted generation needs keepset.Cache(..., prompt_length=...), because it drafts tokens "
                "together with the prompt."
            )
        super().activate_past_recording()

    def observed(self, layer: KeepLayer, observation: Observation) -> None:
        """An event has been reached in a layer: hands its observation on once it is complete.

        That is after second passes, and after the model's own call where its perplexity is looked at.
        """
        complete = [(layer, observation)]
        if self._second is not None:
            with nullcontext() if self._tap is None else self._tap.paused():
                complete = self._second.add(layer, observation, self.layers)
        if self._perplexity is None:
            for found, told in complete:
                self.received(found, told)
            return
        if not self._perplexity.watching:
            raise KeepsetError("This recipe looks at the model's logits: call the model, not only its decoder.")
        if layer.compressed_at != layer.logical:
            raise KeepsetError(
                "A prompt's perplexity cannot be told together with drafted tokens: leave assisted generation out."
            )
        self._waiting += complete

    def foretold(self, perplexity: Perplexity) -> None:
        """The model's logits are there: hands on what waited for them."""
        waiting, self._waiting = self._waiting, []
        for layer, observation in waiting:
            observation.perplexities.update({window: perplexity.of(window) for window in self.needs.perplexity})
            self.received(layer, observation)

    def valid_of(self, newest: int) -> Bool[Tensor, "batch newest"] | None:
        """Which of the newest tokens are no padding; None when all are."""
        valid = self.kept_layers[self.compressed_layers[0]].valid_tokens()
        return None if valid is None else valid[:, -newest:]

    @abstractmethod
    def received(self, layer: KeepLayer, observation: Observation) -> None:
        """An observation is complete; its entries are in the layer's hands."""

    def updating(self) -> None:
        """Notes that a layer has taken new tokens and its attention must follow."""
        if self._attending:
            raise KeepsetError(
                f"keepset.Cache needs the attention implementation {attention.NAME!r}, but another one ran: "
                f"do not change it after creating the cache, or call "
                f"model.set_attn_implementation({attention.NAME!r})."
            )
        self._attending = True

    def attended(self) -> None:
        """Notes that it did."""
        self._attending = False

    def layer_input(self, module: nn.Module, query: Tensor) -> LayerInput:
        """The input of the attention module under way."""
        assert self._tap is not None
        layer_input = self._tap.layer_input(module)
        layer_input.check_rotation(query)
        return layer_input

    def rotation(self, module: nn.Module) -> Rotation | None:
        """How the attention module under way rotates its queries; None where nobody looks at that."""
        return None if self._tap is None else self._tap.layer_input(module).rotation

    def forwarded(self) -> None:
        """Notes that the last layer is done: what the hooks have seen is not needed any more."""
        if self._tap is not None:
            self._tap.forget()

    def stop_watching(self) -> None:
        """Removes the hooks on the model: nothing more is compressed."""
        if self._tap is not None:
            self._tap.close()
        if self._second is not None:
            self._second.close()
        if self._perplexity is not None:
            self._perplexity.close()


def _nbytes(layer: Any) -> int:
    """Bytes that another kind of layer holds: a sliding window may be a view of the whole prompt."""
    held = [x for part in vars(layer).values() for x in (part.values() if isinstance(part, dict) else [part])]
    storages = [tensor.untyped_storage() for tensor in held if isinstance(tensor, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
