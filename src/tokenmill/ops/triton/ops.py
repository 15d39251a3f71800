"""`ops.api.Ops` on one GPU: kernels of this package, and the library for large products."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmill.ops.api import HeadNorms, Rotation
from tokenmill.ops.triton import activation, norm
from tokenmill.ops.triton.linear import LinearScratch, choose, dot, gemv
from tokenmill.ops.triton.qkv import prepare_qkv


class TritonOps:
    """For one stream: split products share one scratch."""

    name = "triton"

    def __init__(self, device: torch.device) -> None:
        self._scratch = LinearScratch(device)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `Ops.linear`."""
        config = choose(x.shape[0], *weight.shape)
        if config is None:
            return F.linear(x, weight, bias)
        if config.kind == "gemv":
            return gemv(x.contiguous(), weight, config, bias=bias)
        return dot(x.contiguous(), weight, config, self._scratch, bias=bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Ops.rms_norm`."""
        return norm.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `Ops.add_rms_norm`."""
        return norm.add_rms_norm(x, residual, weight, eps)

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
        return prepare_qkv(qkv, rotation, norms, keys, values, kv_slots)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """See `Ops.silu_and_mul`."""
        return activation.silu_and_mul(x)
