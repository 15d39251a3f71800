"""The operations that models are made of: one signature each, whatever computes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tokenmill.spec import Activation


@dataclass(frozen=True, slots=True)
class Rotation:
    """The angles of a step's tokens, made once and used by every layer."""

    cos: Tensor  # [tokens, 1, rotary_dim] float32, the angles' cosines twice
    sin: Tensor  # [tokens, 1, rotary_dim] float32, the angles' sines negated, then as they are


@dataclass(frozen=True, slots=True)
class Norm:
    """Root-mean-square normalisation: weight [dim], and what is added to the mean square."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Root-mean-square normalisation of each head of q and of k."""

    query: Tensor  # [head_dim]
    key: Tensor  # [head_dim]
    eps: float


@dataclass(slots=True)
class Hidden:
    """The hidden state of a step's tokens: `value`, to which `parts` are yet to be added."""

    value: Tensor  # [tokens, hidden]
    parts: Tensor | None = None  # [parts, tokens, hidden], float32 or of the value's type


@dataclass(frozen=True, slots=True)
class Experts:
    """One layer's experts, or one rank's part of them. `counters` are zero between two calls."""

    gate_up: Tensor  # [experts, 2 * inner, hidden]: each expert's gate, then its up
    down: Tensor  # [experts, hidden, inner]
    counters: Tensor  # [experts + 1] int32
    num_chosen: int
    is_renormalised: bool  # the chosen experts' weights sum to 1


class Ops(Protocol):
    """Leaf compute. Results have the type of the first argument; sums are taken in float32 or wider."""

    name: str
    has_pdl: bool  # whether kernels may start before the one before has ended

    def stage_tokens(
        self, columns: Tensor, updates: Tensor, last_tokens: Tensor, page_tables: Tensor, page_size: int
    ) -> tuple[Tensor, Tensor]:
        """Enter page updates, then find what the tokens are and where their K and V go.

        Args:
            columns: [3, tokens] int32: ids, or below 0 for the last token of the slot; positions; slots.
            updates: [updates, 3] int32: kind * slots + slot, index, page. One entry's updates all name the same page.
            last_tokens: [slots] integers.
            page_tables: [kinds, slots, pages] integers; written.
            page_size: tokens a page.

        Returns:
            ids [tokens] and places in each kind's K/V pool [kinds, tokens], integers.
        """

    def rotation(self, positions: Tensor, frequencies: Tensor, factor: float) -> Rotation:
        """The angles of positions [tokens], integers, for frequencies [rotary_dim / 2] in radians a position.

        `factor` multiplies cosines and sines. Either is as exact as torch's in float32.
        """

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply x [tokens, in] by weight [out, in] transposed, add bias [out]: [tokens, out]."""

    def normed_linear(self, hidden: Hidden, weight: Tensor, bias: Tensor | None = None, *, norm: Norm | None) -> Tensor:
        """`linear` of the hidden state, which is settled in passing, normalised first if there is a norm."""

    def gated_linear(
        self,
        hidden: Hidden,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        norm: Norm | None,
        activation: Activation = "silu",
    ) -> Tensor:
        """activation(gate) * up, where [tokens, 2 * out] = (gate, up) = normed_linear(hidden, weight, bias, norm=norm).

        gelu_tanh is GELU's approximation by tanh (Hendrycks and Gimpel 2016).
        """

    def add_normed(self, hidden: Hidden, x: Tensor, norm: Norm) -> None:
        """Add x [tokens, hidden], normalised, to the hidden state, whose value may be overwritten."""

    def add_linear(self, hidden: Hidden, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        """Add `linear(x, weight, bias)` to the hidden state, whose value may be overwritten."""

    def normed(self, hidden: Hidden, norm: Norm) -> Tensor:
        """`rms_norm` of the hidden state, which is settled in passing."""

    def add_experts(self, hidden: Hidden, x: Tensor, router: Tensor, experts: Experts) -> None:
        """Add what the chosen experts make of each token to the hidden state, whose value may be overwritten.

        The experts with the greatest scores are chosen, x [tokens, hidden] @ router [experts, hidden] transposed. Each
        makes down @ (silu(gate @ x) * (up @ x)), which is weighted by the softmax of the scores (Shazeer et al. 2017).
        """

    def settle(self, hidden: Hidden) -> Tensor:
        """Add the parts of a hidden state; its value [tokens, hidden]."""

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Divide x [..., dim] by its root mean square, multiply by the weight (Zhang and Sennrich 2019)."""

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
            kv_slots: [tokens] integers, where the tokens' K and V go.

        Returns:
            the queries, [tokens, heads, head_dim].
        """
