"""The gated activation."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tokenmill.ops.triton.launch import pdl_options, start_and_wait
from tokenmill.spec import Activation

BLOCK = 1024


@triton.jit
def gated(gate, up, GATE: tl.constexpr):
    """Activation of the gate times up, in float32; GATE is the activation's name."""
    if GATE == "silu":
        return gate / (1.0 + tl.exp(tl.minimum(-gate, 80.0))) * up
    # 0.5 * (1 + tanh(z)) is sigmoid(2 z), with z = sqrt(2 / pi) * (gate + 0.044715 gate ** 3)
    twice = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(tl.minimum(-twice, 80.0))) * up


@triton.jit
def _activate_and_mul_kernel(x, out, dim, x_stride, GATE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < dim
    start_and_wait(PDL)
    gate = tl.load(x + row * x_stride + columns, mask=is_column, other=0.0).to(tl.float32)  # [BLOCK]
    up = tl.load(x + row * x_stride + dim + columns, mask=is_column, other=0.0).to(tl.float32)  # [BLOCK]
    tl.store(out + row * dim + columns, gated(gate, up, GATE).to(out.dtype.element_ty), mask=is_column)


def activate_and_mul(x: Tensor, activation: Activation, *, pdl: bool = False) -> Tensor:
    """activation(gate) * up (Shazeer 2020).

    Args:
        x: [tokens, 2 * dim] = (gate, up), rows contiguous.
        activation: of the gate.
        pdl: see `launch`.
    """
    tokens, dim = x.shape[0], x.shape[1] // 2
    out = x.new_empty((tokens, dim))
    if tokens:
        block = min(BLOCK, triton.next_power_of_2(dim))
        _activate_and_mul_kernel[(tokens, triton.cdiv(dim, block))](
            x, out, dim, x.stride(0), GATE=activation, BLOCK=block, PDL=pdl, num_warps=4, **pdl_options(pdl)
        )
    return out
