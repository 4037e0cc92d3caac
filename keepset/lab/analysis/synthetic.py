"""GVote's assumptions: hidden states near a normal distribution, and synthetic queries near the next query."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from keepset.core.feature import Needs
from keepset.core.features.runtime_features import RecentQueries
from keepset.core.select import top_mask
from keepset.errors import KeepsetError
from keepset.hf.prompt_session import Recorder
from keepset.methods.gvote import GVote, nucleus, query_logits


@dataclass(frozen=True, eq=False)
class Agreement:
    """How the attention of synthetic queries agrees with that of the true query, for every query head.

    Attributes:
        overlap: the true query's attention on the nucleus of a synthetic query, mean over the samples.
        usage: share of the entries in that nucleus, mean over the samples.
        needed: share of the entries in the true query's own nucleus.
        correlation: Pearson's correlation of the true query's attention with the samples' mean; NaN if either is
            constant over the entries.
    """

    overlap: Float[Tensor, "*heads"]
    usage: Float[Tensor, "*heads"]
    needed: Float[Tensor, "*heads"]
    correlation: Float[Tensor, "*heads"]


def agreement(
    synthetic: Float[Tensor, "*heads samples entries"], true: Float[Tensor, "*heads entries"], p_nuc: float
) -> Agreement:
    """Compare attention over the same entries (Section 3.3 of the paper).

    Args:
        synthetic: attention of the synthetic queries.
        true: attention of the true query.
        p_nuc: the share of the attention that a nucleus holds.
    """
    entries = true.shape[-1]
    needed = nucleus(synthetic, p_nuc)
    chosen = top_mask(synthetic, needed)
    pair = torch.stack([synthetic.double().mean(-2), true.double()])
    centred = pair - pair.mean(-1, keepdim=True)
    covariance, spread = centred.prod(0).sum(-1), centred.square().sum(-1).prod(0).sqrt()
    return Agreement(
        overlap=(true[..., None, :] * chosen).sum(-1).mean(-1),
        usage=needed.double().mean(-1) / entries,
        needed=nucleus(true, p_nuc).double() / entries,
        correlation=covariance / spread,
    )


@torch.no_grad()
def next_query(model: PreTrainedModel, method: GVote, ids: Int[Tensor, "1 tokens"]) -> dict[int, Agreement]:
    """Return for each layer how samples made from all tokens but the last agree with the last token's queries.

    Attention is over the tokens before the last, as in the paper's equation 1.

    Args:
        model: the model.
        method: gvote, whose parameters are used.
        ids: a text, `[1, tokens]`.

    Raises:
        KeepsetError: there are fewer than `method.skip` + 3 tokens.
    """
    if ids.shape[1] < method.skip + 3:
        raise KeepsetError(
            f"{ids.shape[1]} tokens are too few: statistics leave out the first {method.skip} and the last, "
            f"so give {method.skip + 3} or more."
        )
    whole = Recorder(model, Needs(RecentQueries(1)))
    whole.prefill(ids)
    newest = {observation.layer: observation.newest_queries(1)[0] for observation in whole.observations}
    del whole
    masked = Recorder(model, method.traits.needs)
    masked.prefill(ids[:, :-1])
    agreements = {}
    for observation in masked.observations:
        queries = torch.cat([method.queries(observation), newest[observation.layer]], 2)
        attention = query_logits(observation, observation.by_query_group(queries)).softmax(-1)[0].flatten(0, 1)
        agreements[observation.layer] = agreement(attention[:, :-1], attention[:, -1], method.p_nuc)
    return agreements


@dataclass(frozen=True, eq=False)
class Gaussianity:
    """Shape of one layer's hidden states along a text, per channel; NaN for a channel that never changes.

    Attributes:
        distance: Kolmogorov-Smirnov distance `[channels]` between a channel's values and the normal distribution with
            their mean and variance: the largest difference of the two cumulative distributions, from 0 to 1.
        skewness: `[channels]`, 0 for a normal distribution.
        kurtosis: excess kurtosis `[channels]`, 0 for a normal distribution.
    """

    distance: Float[Tensor, " channels"]
    skewness: Float[Tensor, " channels"]
    kurtosis: Float[Tensor, " channels"]


def gaussianity(hidden: Float[Tensor, "tokens channels"]) -> Gaussianity:
    """Return the shape of every channel's values over the tokens."""
    values = hidden.double()
    values = (values - values.mean(0)) / values.std(0, unbiased=False)
    ordered = values.sort(dim=0).values
    normal = torch.special.ndtr(ordered)
    steps = torch.arange(len(values) + 1, device=values.device).double()[:, None] / len(values)
    # A step of the empirical distribution is compared at both its ends.
    distance = torch.maximum(steps[1:] - normal, normal - steps[:-1]).amax(0)
    return Gaussianity(distance, values.pow(3).mean(0), values.pow(4).mean(0) - 3)


@torch.no_grad()
def hidden_gaussianity(model: PreTrainedModel, ids: Int[Tensor, "1 tokens"], skip: int) -> dict[int, Gaussianity]:
    """Return for each layer the shape of the attention's input, which is the layer norm's output.

    Args:
        model: the model.
        ids: a text.
        skip: how many of the first tokens are left out.

    Raises:
        KeepsetError: there are fewer than `skip` + 3 tokens.
    """
    if ids.shape[1] < skip + 3:
        raise KeepsetError(f"{ids.shape[1]} tokens are too few: the first {skip} are left out, so give {skip + 3}.")
    layers: dict[int, Gaussianity] = {}

    def look(layer: int) -> Callable[..., None]:
        def enter(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            layers[layer] = gaussianity(hidden[0, skip:])

        return enter

    attention: list[Any] = [module for module in model.modules() if hasattr(module, "layer_idx")]
    hooks = [module.register_forward_pre_hook(look(module.layer_idx), with_kwargs=True) for module in attention]
    try:
        model(ids, use_cache=False, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    return layers
