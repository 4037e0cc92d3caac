"""`PerplexityHooks`: the perplexity of a prompt's newest tokens, from the logits of the model's own forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from keepset.core.features.runtime_features import Perplexity
from keepset.errors import KeepsetError, UnsupportedModelError
from keepset.hf.hooks import ModelHooks, after_calls, before_calls


class PerplexityHooks(ModelHooks):
    """Hooks around the whole model that see its logits for the newest tokens of the calls with one cache.

    A caller may ask for the last token's logits only, as `generate` does. The model then computes as many as needed,
    and the caller gets those that it asked for. The cache's `on_logits` is called after every call.

    Args:
        model: with a language head.
        past: the cache.
        needs: how many tokens to look at.

    Attributes:
        watching: whether a call of the model with the cache is under way.
    """

    def __init__(self, model: nn.Module, past: Any, needs: Sequence[Perplexity]) -> None:
        self._needs, self._longest = needs, max(needed.tokens for needed in needs)
        super().__init__(model, past)

    def forget(self) -> None:
        self.watching = False
        self._ids: Tensor | None = None
        self._wanted: int | Tensor = 0
        self._losses: list[Tensor] = []
        self._last: list[Tensor] = []

    def _installed(self, model: nn.Module) -> Iterator[RemovableHandle]:
        yield before_calls(model, self._enter)
        yield after_calls(model, self._leave)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("past_key_values") is not self._past():
            return None
        self.watching = True
        self._ids = kwargs.get("input_ids", args[0] if args else None)
        if self._ids is None:
            raise KeepsetError("Embeddings have no perplexity, which this recipe looks at: give token ids.")
        self._wanted = kwargs.get("logits_to_keep", 0)
        if isinstance(self._wanted, int) and self._wanted == 0:
            return None
        least = self._longest + 1
        enough = isinstance(self._wanted, int) and _ends_with_tokens(kwargs.get("attention_mask"), self._ids)
        return args, {**kwargs, "logits_to_keep": max(self._wanted, least) if enough else 0}

    @torch.no_grad()
    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not self.watching or kwargs.get("past_key_values") is not self._past():
            return None
        past, self.watching = kwargs["past_key_values"], False
        logits = getattr(output, "logits", None)
        if not isinstance(logits, Tensor):
            raise UnsupportedModelError(
                f"keepset could not see the logits of {type(module).__name__}, which this recipe looks at: call a "
                "model with a language head, with return_dict=True."
            )
        assert self._ids is not None
        valid = past.progress.valid
        self._add(logits, self._ids, None if valid is None else valid[:, -self._ids.shape[1] :])
        if isinstance(self._wanted, Tensor):
            output.logits = logits[:, self._wanted]
        elif 0 < self._wanted < logits.shape[1]:
            output.logits = logits[:, -self._wanted :].clone()
        self._ids = None
        perplexities = {}
        for needed in self._needs:
            # The first token of all is left out: nothing foretells it.
            newest = (row[-needed.tokens :] for row in self._losses)
            means = [row.mean() if len(row) else row.new_tensor(torch.inf) for row in newest]
            perplexities[needed] = torch.stack(means).exp()
        past.on_logits(perplexities)
        return output

    def _add(
        self, logits: Float[Tensor, "batch newest vocabulary"], ids: Tensor, valid: Bool[Tensor, "batch tokens"] | None
    ) -> None:
        """Take in one call of the model.

        Args:
            logits: of its newest tokens.
            ids: of all its tokens, `[batch, tokens]`.
            valid: which of the tokens are not padding; None if all are real.
        """
        newest, whole = logits.shape[1], logits.shape[1] == ids.shape[1]
        batch = len(ids)
        self._losses = list(self._losses) or [logits.new_zeros(0, dtype=torch.float32)] * batch
        last = self._last or [logits[0, :0]] * batch
        self._last = []
        for row in range(batch):
            exists = slice(None) if valid is None else valid[row, -newest:]
            own, tokens = logits[row][exists], ids[row, -newest:][exists]
            # What foretells the first of these tokens came with the call before, unless something lies between.
            known = torch.cat([last[row] if whole else own[:0], own])
            foretold = known[:-1].float().log_softmax(-1)
            losses = -foretold.gather(-1, tokens[len(tokens) - len(foretold) :, None].to(foretold.device))[:, 0]
            self._losses[row] = torch.cat([self._losses[row], losses])[-self._longest :]
            self._last.append(known[-1:].clone())


def _ends_with_tokens(mask: Tensor | None, ids: Tensor) -> bool:
    """Return whether there is no padding, or padding at the left only."""
    if mask is None:
        return True
    new = mask[:, -ids.shape[1] :].bool()
    return mask.ndim == 2 and not bool((new[:, :-1] & ~new[:, 1:]).any())
