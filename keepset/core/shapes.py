"""The shapes that methods speak in, each under one name."""

from jaxtyping import Bool, Float, Int
from torch import Tensor

Scores = Float[Tensor, "batch kv_heads entries"]
"""A number for every entry of every request and KV head."""

QueryHeadScores = Float[Tensor, "batch query_heads entries"]
"""The same for every query head."""

Quotas = Int[Tensor, "batch kv_heads"]
"""How many entries every KV head of every request keeps."""

Mask = Bool[Tensor, "batch kv_heads entries"]
"""Which entries are meant."""

Queries = Float[Tensor, "batch query_heads n head_dim"]
"""Some queries of every request."""

HiddenStates = Float[Tensor, "batch n hidden"]
"""As many hidden states that enter a layer's attention."""

Rows = Float[Tensor, "batch heads n head_dim"]
"""As many rows of some heads, such as queries or keys."""
