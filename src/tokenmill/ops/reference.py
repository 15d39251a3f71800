"""The operations in plain torch: they run anywhere, and faster ones are tested against them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class ReferenceOps:
    """`ops.api.Ops` in plain torch."""

    name = "reference"

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `Ops.linear`."""
        return F.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Ops.rms_norm`."""
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `Ops.add_rms_norm`."""
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See `Ops.rope`."""
        rotary_dim = cos.shape[-1]
        turned = x[..., :rotary_dim].float()  # [tokens, heads, rotary_dim]
        turned = torch.addcmul(turned * cos, turned.roll(rotary_dim // 2, -1), sin).to(x.dtype)
        return turned if rotary_dim == x.shape[-1] else torch.cat((turned, x[..., rotary_dim:]), dim=-1)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """See `Ops.silu_and_mul`."""
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    def store_kv(self, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """See `Ops.store_kv`."""
        keys.index_copy_(0, slots, key)
        values.index_copy_(0, slots, value)
