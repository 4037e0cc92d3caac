"""Names for the tensor shapes that methods use."""

from jaxtyping import Bool, Float, Int
from torch import Tensor

Scores = Float[Tensor, "batch kv_heads entries"]
"""A number for every entry of every request and KV head."""

QueryHeadScores = Float[Tensor, "batch query_heads entries"]
"""A number for every entry of every request and query head."""

Quotas = Int[Tensor, "batch kv_heads"]
"""The number of entries that every KV head of every request keeps."""

Mask = Bool[Tensor, "batch kv_heads entries"]
"""A truth value for every entry of every request and KV head."""

Queries = Float[Tensor, "batch query_heads n head_dim"]
"""n queries of every query head of every request."""

HiddenStates = Float[Tensor, "batch n hidden"]
"""n hidden states of every request, as they enter a layer's attention."""

Rows = Float[Tensor, "batch heads n head_dim"]
"""n rows of every head of every request, such as queries or keys."""
