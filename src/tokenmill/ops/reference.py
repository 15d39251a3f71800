"""The operations in plain torch: they run anywhere, and faster ones are tested against them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmill.ops.api import Experts, HeadNorms, Hidden, Norm, Rotation
from tokenmill.spec import Activation


class ReferenceOps:
    """`ops.api.Ops` in plain torch."""

    name = "reference"
    has_pdl = False

    def stage_tokens(
        self, columns: Tensor, updates: Tensor, last_tokens: Tensor, page_tables: Tensor, page_size: int
    ) -> tuple[Tensor, Tensor]:
        """See `Ops.stage_tokens`."""
        page_tables.flatten(0, 1)[updates[:, 0], updates[:, 1]] = updates[:, 2].to(page_tables.dtype)
        tokens, positions, slots = columns
        input_ids = torch.where(tokens < 0, last_tokens[slots], tokens)
        return input_ids, torch.stack([kv_slots_of(slots, positions, table, page_size) for table in page_tables])

    def rotation(self, positions: Tensor, frequencies: Tensor, factor: float) -> Rotation:
        """See `Ops.rotation`."""
        angles = positions.float().view(-1, 1, 1) * frequencies  # [tokens, 1, rotary_dim / 2]
        cos, sin = angles.cos() * factor, angles.sin() * factor
        return Rotation(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `Ops.linear`."""
        return F.linear(x, weight, bias)

    def normed_linear(self, hidden: Hidden, weight: Tensor, bias: Tensor | None = None, *, norm: Norm | None) -> Tensor:
        """See `Ops.normed_linear`."""
        value = self.settle(hidden)
        return F.linear(value if norm is None else self.rms_norm(value, norm), weight, bias)

    def gated_linear(
        self,
        hidden: Hidden,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        norm: Norm | None,
        activation: Activation = "silu",
    ) -> Tensor:
        """See `Ops.gated_linear`."""
        gate, up = self.normed_linear(hidden, weight, bias, norm=norm).chunk(2, dim=-1)
        return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up

    def add_normed(self, hidden: Hidden, x: Tensor, norm: Norm) -> None:
        """See `Ops.add_normed`."""
        hidden.value = self.rms_norm(x, norm).add_(self.settle(hidden))

    def add_linear(self, hidden: Hidden, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        """See `Ops.add_linear`."""
        hidden.value = F.linear(x, weight, bias).add_(self.settle(hidden))

    def normed(self, hidden: Hidden, norm: Norm) -> Tensor:
        """See `Ops.normed`."""
        return self.rms_norm(self.settle(hidden), norm)

    def add_experts(self, hidden: Hidden, x: Tensor, router: Tensor, experts: Experts) -> None:
        """See `Ops.add_experts`: one product for each expert that has tokens, over all of them."""
        weights, chosen = choose_experts(F.linear(x, router), experts)
        order = chosen.flatten().argsort(stable=True)  # [tokens * chosen], by expert
        counts = chosen.flatten().bincount(minlength=len(router)).tolist()
        outputs = x.new_empty(len(order), x.shape[1])
        for expert, places in enumerate(order.split_with_sizes(counts)):
            if len(places):
                gate, up = F.linear(x[places // experts.num_chosen], experts.gate_up[expert]).chunk(2, dim=-1)
                outputs[places] = F.linear(F.silu(gate).mul_(up), experts.down[expert])
        parts = outputs.view(len(x), experts.num_chosen, x.shape[1]) * weights.unsqueeze(2)  # float32
        hidden.value = parts.sum(1).add_(self.settle(hidden)).to(x.dtype)

    def settle(self, hidden: Hidden) -> Tensor:
        """See `Ops.settle`; these operations leave no parts."""
        assert hidden.parts is None
        return hidden.value

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        """See `Ops.rms_norm`."""
        return F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)

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
            query = rotate(self.rms_norm(query, Norm(norms.query, norms.eps)), rotation)
            key = rotate(self.rms_norm(key, Norm(norms.key, norms.eps)), rotation)
        keys.index_copy_(0, kv_slots, key.to(keys.dtype))
        values.index_copy_(0, kv_slots, value.to(values.dtype))
        return query


def choose_experts(scores: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """Weights, float32, and numbers of each token's experts [tokens, chosen], of scores [tokens, experts]."""
    weights, chosen = scores.float().softmax(-1).topk(experts.num_chosen)
    return weights / weights.sum(-1, keepdim=True) if experts.is_renormalised else weights, chosen


def kv_slots_of(slots: Tensor, positions: Tensor, page_table: Tensor, page_size: int) -> Tensor:
    """Where positions of slots lie in the K/V pool; all arguments broadcast."""
    return page_table[slots, positions // page_size] * page_size + positions % page_size


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the halves of the first rotary dimensions of x [tokens, heads, head_dim]."""
    rotary_dim = rotation.cos.shape[-1]
    turned = x[..., :rotary_dim].float()  # [tokens, heads, rotary_dim]
    turned = torch.addcmul(turned * rotation.cos, turned.roll(rotary_dim // 2, -1), rotation.sin).to(x.dtype)
    return turned if rotary_dim == x.shape[-1] else torch.cat((turned, x[..., rotary_dim:]), dim=-1)
