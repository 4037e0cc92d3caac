"""Undoing and redoing the rotation of queries, with the table of cosines and sines that the model itself uses."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keepset.errors import KeepsetError

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types of which it is known that all layers rotate, and with one table."""


class Rotation:
    """The rotary embedding of a model.

    Args:
        table: cosines, then sines, of every position, `[positions, rotary_dim]`; scaled where the model does so.
        halves: whether dimension i rotates with i + rotary_dim / 2 (as in Llama), or with its neighbour.
    """

    def __init__(self, table: Float[Tensor, "positions rotary_dim"], halves: bool) -> None:
        self._table, self._halves = table, halves

    @classmethod
    def of_model(cls, model_type: str, head_dim: int, dtype: torch.dtype) -> Rotation:
        """The rotation of the model that this process has loaded.

        Raises:
            KeepsetError: it cannot be told which one the queries got.
        """
        from vllm.model_executor.layers import rotary_embedding

        tables = {
            id(rope): rope
            for rope in getattr(rotary_embedding, "_ROPE_DICT", {}).values()
            if rope.head_size == head_dim and rope.dtype == dtype and hasattr(rope, "cos_sin_cache")
        }
        if model_type not in ARCHITECTURES or len(tables) != 1:
            raise KeepsetError(
                f"Under vLLM, methods that look at future queries support {', '.join(ARCHITECTURES)}, "
                f"and not {model_type}: choose another method, such as snapkv."
            )
        (rope,) = tables.values()
        return cls(rope.cos_sin_cache, rope.is_neox_style)

    def undo(
        self, queries: Float[Tensor, "batch heads n head_dim"], positions: Int[Tensor, "batch n"]
    ) -> Float[Tensor, "batch heads n head_dim"]:
        """Queries as they were before rotation, float32."""
        cos, sin = self._table[positions][:, None].float().chunk(2, -1)
        # Scaled rotations (YaRN) are not orthogonal; dividing by the squared scale inverts them too.
        scale = cos.square() + sin.square()
        return self._rotate(queries.float(), cos / scale, -sin / scale)

    def ahead(
        self, rows: Float[Tensor, "batch heads n head_dim"], lengths: Int[Tensor, " batch"], future: int
    ) -> Float[Tensor, "batch heads n head_dim"]:
        """Rows under the mean rotation of the `future` positions from each request's length on.

        Rotation is linear in cosines and sines, so rotating with their mean is the mean of the rotations.
        """
        cos, sin = self._far(lengths[:, None] + torch.arange(future, device=lengths.device))
        return self._rotate(rows, cos.mean(1)[:, None, None], sin.mean(1)[:, None, None])

    def _far(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, also beyond the table: there the angles of two positions are added."""
        last = self._table.shape[0] - 1
        cos, sin = self._table[positions.clamp(max=last)].float().chunk(2, -1)
        beyond = (positions - last).clamp(min=0)
        if not bool(beyond.any()):
            return cos, sin
        more_cos, more_sin = self._table[beyond].float().chunk(2, -1)
        scale = self._table[0].float().chunk(2, -1)[0]  # cosines of no rotation at all
        return (cos * more_cos - sin * more_sin) / scale, (sin * more_cos + cos * more_sin) / scale

    def _rotate(self, rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = cos.shape[-1]
        turned, rest = rows[..., : 2 * half], rows[..., 2 * half :]
        if self._halves:
            a, b = turned.chunk(2, -1)
            turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        else:
            a, b = turned[..., ::2], turned[..., 1::2]
            turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        return torch.cat([turned, rest], -1) if rest.shape[-1] else turned
