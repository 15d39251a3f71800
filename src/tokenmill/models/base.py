"""What the engine expects of a model, and what a model expects of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from tokenmill.attention.base import KVCache
from tokenmill.layers.batch import ForwardBatch
from tokenmill.ops.api import Hidden
from tokenmill.spec import ModelSpec


class CausalLM(Protocol):
    """A decoder-only language model, or one rank's part of it."""

    @property
    def spec(self) -> ModelSpec:
        """The whole model's shape."""

    @property
    def num_kv_heads(self) -> int:
        """K/V heads of this rank: what its `KVCache` must have."""

    def forward(self, batch: ForwardBatch, kv: Sequence[KVCache]) -> Tensor:
        """Compute a step's tokens, and the logits [sampled, vocab] of those that draw, in the model's type.

        Writes the tokens' K and V to `kv`, a cache for each of the spec's kinds. Call it in inference mode.
        """

    def hidden(self, batch: ForwardBatch, kv: Sequence[KVCache]) -> Hidden:
        """The first part of `forward`: the hidden state of the tokens that draw."""

    def final_states(self, hidden: Hidden) -> Tensor:
        """Rows of a hidden state as the logits are made of: [rows, hidden], normalised."""

    def logits(self, hidden: Hidden) -> Tensor:
        """The rest of `forward`, of any rows of a hidden state; may overwrite them."""


class WeightSource(Protocol):
    """A checkpoint as models see it: tensors under Hugging Face names, read a few rows at a time."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def spec(self) -> ModelSpec:
        """Shape of the model that the tensors are for."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The tensors' shapes, in the order in which they lie in the file."""

    def read(self, name: str, start: int, stop: int, *, is_pinned: bool = False) -> Tensor:
        """Rows start .. stop - 1 of a tensor, [rows, ...] of a floating type; called by several threads."""

    def kind(self, name: str) -> str:
        """The quantised type of a tensor as GGUF calls it, such as Q4_1; empty: it holds plain numbers."""

    def read_packed(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start .. stop - 1 of a tensor as they are in the file, [rows, bytes] uint8; as `read`."""
