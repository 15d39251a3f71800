"""Root-mean-square normalisation."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tokenmill.ops.triton.launch import pdl_options, start_and_wait

MAX_DIM = 16384


@triton.jit
def _rms_norm_kernel(
    x, weight, normed, parts, eps, x_stride,
    DIM: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, IS_ADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < DIM
    factor = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    start_and_wait(PDL)
    value = tl.load(x + row * x_stride + columns, mask=is_column, other=0.0).to(tl.float32)  # [BLOCK]
    if PARTS > 0:
        for part in tl.static_range(PARTS):
            at = (part * tl.num_programs(0) + row) * DIM + columns
            value += tl.load(parts + at, mask=is_column, other=0.0)
        rounded = value.to(x.dtype.element_ty)
        tl.store(x + row * x_stride + columns, rounded, mask=is_column)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / DIM + eps)
    value *= scale * factor
    if IS_ADDED:
        value = value.to(x.dtype.element_ty).to(tl.float32)
        value += tl.load(normed + row * DIM + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(normed + row * DIM + columns, value.to(normed.dtype.element_ty), mask=is_column)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    parts: Tensor | None = None,
    residual: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """Divide each row by its root mean square and multiply by the weight (Zhang and Sennrich 2019).

    Args:
        x: [tokens, dim], rows contiguous, dim <= 16384.
        weight: [dim].
        eps: added to the mean square.
        parts: [parts, tokens, dim] float32, first added to x, which is overwritten; or None.
        residual: [tokens, dim], rows contiguous, to which the result is added in place; or None.
        pdl: see `launch`.
    """
    tokens, dim = x.shape
    if dim > MAX_DIM:
        raise ValueError(f"rows of {dim} are too long to normalise; the longest are {MAX_DIM}")
    normed = x.new_empty((tokens, dim)) if residual is None else residual
    if tokens:
        block = triton.next_power_of_2(dim)
        _rms_norm_kernel[(tokens,)](
            x, weight, normed, x if parts is None else parts, eps, x.stride(0), DIM=dim, BLOCK=block,
            PARTS=0 if parts is None else parts.shape[0], IS_ADDED=residual is not None, PDL=pdl,
            num_warps=min(max(block // 256, 1), 16),
            **pdl_options(pdl),
        )  # fmt: skip
    return normed
