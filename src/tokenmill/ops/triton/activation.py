"""The gated activation."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tokenmill.ops.triton.launch import pdl_options, start_and_wait

BLOCK = 1024


@triton.jit
def _silu_and_mul_kernel(x, out, dim, x_stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < dim
    start_and_wait(PDL)
    gate = tl.load(x + row * x_stride + columns, mask=is_column, other=0.0).to(tl.float32)  # [BLOCK]
    up = tl.load(x + row * x_stride + dim + columns, mask=is_column, other=0.0).to(tl.float32)  # [BLOCK]
    gated = gate / (1.0 + tl.exp(tl.minimum(-gate, 80.0))) * up
    tl.store(out + row * dim + columns, gated.to(out.dtype.element_ty), mask=is_column)


def silu_and_mul(x: Tensor, *, pdl: bool = False) -> Tensor:
    """silu(gate) * up (Shazeer 2020).

    Args:
        x: [tokens, 2 * dim] = (gate, up), rows contiguous.
        pdl: see `launch`.
    """
    tokens, dim = x.shape[0], x.shape[1] // 2
    out = x.new_empty((tokens, dim))
    if tokens:
        block = min(BLOCK, triton.next_power_of_2(dim))
        _silu_and_mul_kernel[(tokens, triton.cdiv(dim, block))](
            x, out, dim, x.stride(0), BLOCK=block, PDL=pdl, num_warps=4, **pdl_options(pdl)
        )
    return out
