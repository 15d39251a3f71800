"""Root-mean-square normalisation."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tokenmill.ops.triton.launch import pdl_options, start_and_wait

MAX_DIM = 16384


@triton.jit
def _rms_norm_kernel(x, weight, normed, eps, x_stride, DIM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < DIM
    start_and_wait(PDL)
    value = tl.load(x + row * x_stride + columns, mask=is_column, other=0.0).to(tl.float32)  # [BLOCK]
    scale = tl.rsqrt(tl.sum(value * value, 0) / DIM + eps)
    factor = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(normed + row * DIM + columns, (value * scale * factor).to(normed.dtype.element_ty), mask=is_column)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, pdl: bool = False) -> Tensor:
    """Divide each row by its root mean square and multiply by the weight (Zhang and Sennrich 2019).

    Args:
        x: [tokens, dim], rows contiguous, dim <= 16384.
        weight: [dim].
        eps: added to the mean square.
        pdl: see `launch`.
    """
    tokens, dim = x.shape
    if dim > MAX_DIM:
        raise ValueError(f"rows of {dim} are too long to normalise; the longest are {MAX_DIM}")
    normed = x.new_empty((tokens, dim))
    if tokens:
        block = triton.next_power_of_2(dim)
        _rms_norm_kernel[(tokens,)](
            x, weight, normed, eps, x.stride(0), DIM=dim, BLOCK=block, PDL=pdl,
            num_warps=min(max(block // 256, 1), 16), **pdl_options(pdl),
        )  # fmt: skip
    return normed
