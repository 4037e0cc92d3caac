"""`Judge`: compares tables on one context, whose prompt runs only once."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from keepset.core.budget import Budget
from keepset.core.observation import Observation
from keepset.core.tables import Tables
from keepset.errors import KeepsetError
from keepset.hf.prompt_session import CachedPrompt, PromptSession
from keepset.lab.compile.corpus import Passage
from keepset.methods.compilerkv import CompilerKV
from keepset.recipe import Recipe


@dataclass(frozen=True)
class Verdict:
    """The value of a compression before its penalty; 0 is as good as the full cache.

    Attributes:
        said: the full cache's mean negative log-likelihood of the following tokens, less the compressed cache's
            (equations 2 and 3).
        expected: the expectation of `said` over the full cache's own predictions, instead of the text's tokens: the
            negated mean KL(full || compressed). It has the same meaning and far less variance.
        kept: entries per KV head, averaged over layers.
        admitted: entries per KV head that the thresholds admit, without the budget's cut (equation 14).
    """

    said: float
    expected: float
    kept: float
    admitted: float


class Judge:
    """One context, whose prompt has run with the full cache.

    Attributes:
        risk: entropy and perplexity of the prompt (equations 12 and 13).
    """

    def __init__(self, model: PreTrainedModel, method: CompilerKV, context: Passage) -> None:
        self._method = _Gated(**{**dataclasses.asdict(method), "elastic": True, "gate": True})
        ids = context.ids.to(model.device)[None]
        self._session = PromptSession(model, ids[:, : context.tokens], [Recipe.of(self._method)])
        self._following = ids[:, context.tokens :]
        observations = self._session.prefill().observations
        self._received = self._method.received_attention(observations)
        entropy, perplexity = self._method.risk(observations[0], self._received)
        # NaN is the highest risk, as in Tables.bins.
        self.risk = float(entropy.nan_to_num(torch.inf)), float(perplexity.nan_to_num(torch.inf))

    def verdict(self, tables: Tables, keep: int, *, elastic: bool) -> Verdict:
        """Return the value of compressing with these tables.

        Args:
            tables: the tables.
            keep: entries per KV head.
            elastic: whether thresholds may keep fewer entries.

        Raises:
            KeepsetError: the model's logits are not finite.
        """
        parameters = {**dataclasses.asdict(self._method), "elastic": elastic}
        method = _Given(**parameters, given=tables, received=self._received, signals=self._signals)
        prompt = self._session.compress(Recipe(method, Budget(keep, recent=method.window)))
        uncut = method.select_all(self._session.prefill().observations, Budget(1.0, recent=method.window))
        keep_set = prompt.event.keep_set
        assert keep_set is not None
        compressed, full = self._log_probabilities(prompt), self._full
        said = float((compressed - full).gather(1, self._following[0, 1:, None]).mean())
        expected = -float(F.kl_div(compressed, full, log_target=True, reduction="none").sum(-1).mean())
        if not (math.isfinite(said) and math.isfinite(expected)):
            raise KeepsetError("Some of the model's logits are not finite numbers: no tables can be compiled.")
        return Verdict(said, expected, *(float(choice.counts.double().mean()) for choice in (keep_set, uncut)))

    @cached_property
    def _signals(self) -> dict[int, Tensor]:
        return {
            observation.layer: self._method.signal(observation, self._received)
            for observation in self._session.prefill().observations
        }

    @cached_property
    def _full(self) -> Float[Tensor, "n vocabulary"]:
        return self._log_probabilities(self._session.compress(None))

    def _log_probabilities(self, prompt: CachedPrompt) -> Float[Tensor, "n vocabulary"]:
        """Return log-probabilities of all following tokens but the first, which both caches predict alike."""
        return prompt.follow(self._following[:, :-1]).float().log_softmax(-1)


class _Gated(CompilerKV):
    """The method before it has tables."""

    @property
    def gated(self) -> bool:
        return self.elastic


@dataclass(frozen=True, eq=False, kw_only=True)
class _Given(_Gated):
    """The method with tables that are in no file, and with all that does not depend on them computed beforehand."""

    given: Tables
    received: Tensor
    signals: Mapping[int, Tensor]

    def __post_init__(self) -> None:
        """Check nothing, because all parameters come from a checked recipe."""

    def tables_for(self, observation: Observation) -> Tables:
        return self.given

    def received_attention(self, observations: object) -> Float[Tensor, "batch positions"]:
        return self.received

    def signal(
        self, observation: Observation, received: Float[Tensor, "batch positions"]
    ) -> Float[Tensor, "batch kv_heads _ entries"]:
        return self.signals[observation.layer]
