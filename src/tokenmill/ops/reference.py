"""The operations in plain torch: they run anywhere, and faster ones are tested against them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmill.ops.api import HeadNorms, Rotation


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

    def prepare_qkv(
        self,
        qkv: Tensor,
        rotation: Rotation,
        norms: HeadNorms | None,
        keys: Tensor,
        values: Tensor,
        kv_slots: Tensor,
    ) -> Tensor:
        """See `Ops.prepare_qkv`."""
        num_kv_heads = keys.shape[1]
        num_heads = qkv.shape[1] - 2 * num_kv_heads
        value = qkv[:, num_heads + num_kv_heads :]
        if norms is None:
            turned = rotate(qkv[:, : num_heads + num_kv_heads], rotation)
            query, key = turned[:, :num_heads], turned[:, num_heads:]
        else:
            query, key = qkv[:, :num_heads], qkv[:, num_heads : num_heads + num_kv_heads]
            query = rotate(self.rms_norm(query, norms.query, norms.eps), rotation)
            key = rotate(self.rms_norm(key, norms.key, norms.eps), rotation)
        keys.index_copy_(0, kv_slots, key)
        values.index_copy_(0, kv_slots, value)
        return query

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """See `Ops.silu_and_mul`."""
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the halves of the first rotary dimensions of x [tokens, heads, head_dim]."""
    rotary_dim = rotation.cos.shape[-1]
    turned = x[..., :rotary_dim].float()  # [tokens, heads, rotary_dim]
    turned = torch.addcmul(turned * rotation.cos, turned.roll(rotary_dim // 2, -1), rotation.sin).to(x.dtype)
    return turned if rotary_dim == x.shape[-1] else torch.cat((turned, x[..., rotary_dim:]), dim=-1)
