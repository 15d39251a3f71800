"""The operations that models are made of: one signature each, whatever computes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rotation:
    """The angles of a step's tokens, made once and used by every layer."""

    cos: Tensor  # [tokens, 1, rotary_dim] float32, the angles' cosines twice
    sin: Tensor  # [tokens, 1, rotary_dim] float32, the angles' sines negated, then as they are


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Root-mean-square normalisation of each head of q and of k."""

    query: Tensor  # [head_dim]
    key: Tensor  # [head_dim]
    eps: float


class Ops(Protocol):
    """Leaf compute. Results have the type of the first argument; sums are taken in float32 or wider."""

    name: str

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply x [tokens, in] by weight [out, in] transposed and add bias [out]; returns [tokens, out]."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Divide x [tokens, dim] by its root mean square, multiply by weight [dim] (Zhang and Sennrich 2019)."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual)."""

    def prepare_qkv(
        self,
        qkv: Tensor,
        rotation: Rotation,
        norms: HeadNorms | None,
        keys: Tensor,
        values: Tensor,
        kv_slots: Tensor,
    ) -> Tensor:
        """Normalise q and k by head if the model does, rotate them (Su et al. 2021), and store k and v.

        Args:
            qkv: [tokens, heads + 2 * kv_heads, head_dim]: queries, then keys, then values.
            rotation: the tokens' angles.
            norms: weights of the normalisation (Qwen3), or None.
            keys: [kv slots, kv_heads, head_dim], one layer's; written.
            values: the same for values; written.
            kv_slots: [tokens] int64, where the tokens' K and V go.

        Returns:
            the queries, [tokens, heads, head_dim].
        """

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """silu(gate) * up for x [tokens, 2 * dim] = (gate, up); returns [tokens, dim]."""
