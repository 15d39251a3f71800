"""The operations that models are made of: one signature each, whatever computes it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Ops(Protocol):
    """Leaf compute. Results have the type of the first argument; sums are taken in float32 or wider."""

    name: str

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply x [tokens, in] by weight [out, in] transposed and add bias [out]; returns [tokens, out]."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Divide x [tokens, dim] by its root mean square, multiply by weight [dim] (Zhang and Sennrich 2019)."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual)."""

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the halves of the first rotary dimensions (Su et al. 2021).

        Args:
            x: [tokens, heads, head_dim].
            cos: [tokens, 1, rotary_dim] float32, the angles' cosines twice.
            sin: [tokens, 1, rotary_dim] float32, the angles' sines negated, then as they are.

        Returns:
            [tokens, heads, head_dim].
        """

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """silu(gate) * up for x [tokens, 2 * dim] = (gate, up); returns [tokens, dim]."""

    def store_kv(self, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Write key and value [tokens, kv_heads, head_dim] to keys and values [slots, kv_heads, head_dim].

        `slots` is [tokens] int64, without repetition.
        """
