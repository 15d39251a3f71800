"""`ops.api.Ops` on one GPU: kernels of this package, and the library for large products."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from tokenmill.ops.api import HeadNorms, Norm, Rotation
from tokenmill.ops.triton.activation import silu_and_mul
from tokenmill.ops.triton.gemv import GEMV_ROWS, choose_gemv, gemv
from tokenmill.ops.triton.inputs import make_rotation, stage_tokens
from tokenmill.ops.triton.norm import rms_norm
from tokenmill.ops.triton.products import MAX_ROWS, choose_product, product
from tokenmill.ops.triton.qkv import prepare_qkv

WIDE_LINES = 16384  # of a weight, from where matrix units win at three rows already


class TritonOps:
    """Kernels of this package, and the library.

    Norm, product, gate and residual are one kernel for few tokens; for many, and where `choose_product` says so, the
    product is the library's. With `has_pdl`, small steps overlap the end of each kernel with the start of the next (see
    `launch`).
    """

    name = "triton"

    def __init__(self, *, has_pdl: bool = False) -> None:
        self.has_pdl = has_pdl

    def stage_tokens(
        self, columns: Tensor, updates: Tensor, last_tokens: Tensor, page_table: Tensor, page_size: int
    ) -> tuple[Tensor, Tensor]:
        """See `Ops.stage_tokens`."""
        return stage_tokens(columns, updates, last_tokens, page_table, page_size, pdl=self.has_pdl)

    def rotation(self, positions: Tensor, frequencies: Tensor, factor: float) -> Rotation:
        """See `Ops.rotation`."""
        return make_rotation(positions, frequencies, factor, pdl=self.has_pdl)

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """See `Ops.linear`."""
        fused = self._fused(x, weight, bias, norm, residual)
        return self._library(x, weight, bias, norm, residual) if fused is None else fused

    def gated_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, norm: Norm) -> Tensor:
        """See `Ops.gated_linear`."""
        fused = self._fused(x, weight, bias, norm, None, is_gated=True)
        if fused is None:
            return silu_and_mul(self._library(x, weight, bias, norm, None), pdl=self._uses_pdl(x))
        return fused

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        """See `Ops.rms_norm`."""
        return rms_norm(x, norm.weight, norm.eps)

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
        return prepare_qkv(qkv, rotation, norms, keys, values, kv_slots, pdl=self._uses_pdl(qkv))

    def _fused(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm: Norm | None,
        residual: Tensor | None,
        *,
        is_gated: bool = False,
    ) -> Tensor | None:
        x, rows, pdl = x.contiguous(), x.shape[0], self._uses_pdl(x)
        lines, inputs = weight.shape
        norm_weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        compute: Callable[..., Tensor]
        if rows <= 2 or (rows <= GEMV_ROWS and lines < WIDE_LINES):
            outputs = lines // 2 if is_gated else lines
            compute = partial(gemv, config=choose_gemv(rows, outputs, inputs, is_gated=is_gated))
        else:
            config = choose_product(rows, lines, inputs, is_gated=is_gated)
            if config is None or x.element_size() > 2:  # float32 is for checks: no matrix unit multiplies it exactly
                return None
            if norm_weight is not None and not config.fuses_norm(inputs):
                x, norm_weight = rms_norm(x, norm_weight, eps, pdl=pdl), None
            compute = partial(product, config=config)
        options = {"norm_weight": norm_weight, "eps": eps, "residual": residual, "is_gated": is_gated, "pdl": pdl}
        return compute(x, weight, bias=bias, **options)

    def _library(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm | None, residual: Tensor | None
    ) -> Tensor:
        if norm is not None:
            x = rms_norm(x, norm.weight, norm.eps, pdl=self._uses_pdl(x))
        if residual is not None and bias is None:
            return residual.addmm_(x, weight.t())
        result = F.linear(x, weight, bias)
        return result if residual is None else result.add_(residual)

    def _uses_pdl(self, x: Tensor) -> bool:
        return self.has_pdl and x.shape[0] <= MAX_ROWS
