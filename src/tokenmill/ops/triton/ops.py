"""`ops.api.Ops` on one GPU: kernels of this package, and the library for large products."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmill.ops.api import HeadNorms, Norm, Rotation
from tokenmill.ops.triton.activation import silu_and_mul
from tokenmill.ops.triton.inputs import make_rotation, stage_tokens
from tokenmill.ops.triton.linear import DOT_ROWS, GEMV_ROWS, LinearScratch, choose, dot, gemv
from tokenmill.ops.triton.norm import rms_norm
from tokenmill.ops.triton.qkv import prepare_qkv


class TritonOps:
    """For one stream: split products share one scratch.

    Up to four tokens norm, product, gate and residual are one kernel; up to sixty-four the product is a kernel of
    ours; beyond, the library's. With `has_pdl`, steps without the library overlap the end of each kernel with the start
    of the next (see `launch`).
    """

    name = "triton"

    def __init__(self, device: torch.device, *, has_pdl: bool = False) -> None:
        self._scratch = LinearScratch(device)
        self._has_pdl = has_pdl

    def stage_tokens(
        self, columns: Tensor, updates: Tensor, last_tokens: Tensor, page_table: Tensor, page_size: int
    ) -> tuple[Tensor, Tensor]:
        """See `Ops.stage_tokens`."""
        return stage_tokens(columns, updates, last_tokens, page_table, page_size, pdl=self._has_pdl)

    def rotation(self, positions: Tensor, frequencies: Tensor, factor: float) -> Rotation:
        """See `Ops.rotation`."""
        return make_rotation(positions, frequencies, factor, pdl=self._has_pdl)

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
        x, pdl = x.contiguous(), self._uses_pdl(x)
        config = choose(x.shape[0], *weight.shape)
        if config is not None and config.kind == "gemv":
            scale, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
            return gemv(x, weight, config, bias=bias, norm_weight=scale, eps=eps, residual=residual, pdl=pdl)
        if norm is not None:
            x = rms_norm(x, norm.weight, norm.eps, pdl=pdl)
        if config is not None:
            return dot(x, weight, config, self._scratch, bias=bias, residual=residual, pdl=pdl)
        if residual is not None and bias is None:
            return torch.addmm(residual, x, weight.t())
        product = F.linear(x, weight, bias)
        return product if residual is None else product.add_(residual)

    def gated_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, norm: Norm) -> Tensor:
        """See `Ops.gated_linear`."""
        if x.shape[0] <= GEMV_ROWS and bias is None:
            config = choose(x.shape[0], weight.shape[0] // 2, weight.shape[1])
            if config is not None and config.kind == "gemv":
                pdl = self._uses_pdl(x)
                return gemv(
                    x.contiguous(), weight, config, norm_weight=norm.weight, eps=norm.eps, is_gated=True, pdl=pdl
                )
        return silu_and_mul(self.linear(x, weight, bias, norm=norm), pdl=self._uses_pdl(x))

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

    def _uses_pdl(self, x: Tensor) -> bool:
        return self._has_pdl and x.shape[0] <= DOT_ROWS
