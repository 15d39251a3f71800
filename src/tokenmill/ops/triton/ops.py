"""`ops.api.Ops` on one GPU: kernels of this package, and the library for large products."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmill.ops.api import Experts, HeadNorms, Hidden, Norm, Rotation
from tokenmill.ops.triton.activation import activate_and_mul
from tokenmill.ops.triton.gemv import GEMV_ROWS, choose_gemv, gemv
from tokenmill.ops.triton.inputs import make_rotation, stage_tokens
from tokenmill.ops.triton.moe import choose_tiles, experts_parts
from tokenmill.ops.triton.norm import rms_norm
from tokenmill.ops.triton.products import MAX_ROWS, choose_parts, choose_product, choose_scores, product
from tokenmill.ops.triton.qkv import prepare_qkv
from tokenmill.spec import Activation

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
        self, columns: Tensor, updates: Tensor, last_tokens: Tensor, page_tables: Tensor, page_size: int
    ) -> tuple[Tensor, Tensor]:
        """See `Ops.stage_tokens`."""
        return stage_tokens(columns, updates, last_tokens, page_tables, page_size, pdl=self.has_pdl)

    def rotation(self, positions: Tensor, frequencies: Tensor, factor: float) -> Rotation:
        """See `Ops.rotation`."""
        return make_rotation(positions, frequencies, factor, pdl=self.has_pdl)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `Ops.linear`."""
        fused = self._fused(x, weight, bias)
        return F.linear(x, weight, bias) if fused is None else fused

    def normed_linear(self, hidden: Hidden, weight: Tensor, bias: Tensor | None = None, *, norm: Norm | None) -> Tensor:
        """See `Ops.normed_linear`."""
        fused = self._fused(hidden, weight, bias, norm=norm)
        return F.linear(self.normed(hidden, norm), weight, bias) if fused is None else fused

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
        fused = self._fused(hidden, weight, bias, norm=norm, gate=activation)
        if fused is None:
            joined = F.linear(self.normed(hidden, norm), weight, bias)
            return activate_and_mul(joined, activation, pdl=self._uses_pdl(joined))
        return fused

    def add_normed(self, hidden: Hidden, x: Tensor, norm: Norm) -> None:
        """See `Ops.add_normed`."""
        value = self.settle(hidden)
        rms_norm(x.contiguous(), norm.weight, norm.eps, residual=value, pdl=self._uses_pdl(value))

    def add_linear(self, hidden: Hidden, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        """See `Ops.add_linear`."""
        value = self.settle(hidden)
        config = choose_parts(x.shape[0], *weight.shape) if bias is None and x.element_size() == 2 else None
        if config is not None:
            hidden.parts = product(x.contiguous(), weight, config, pdl=self._uses_pdl(x))
        elif self._fused(x, weight, bias, residual=value) is not None:
            return
        elif bias is None:
            value.addmm_(x, weight.t())
        else:
            value.add_(F.linear(x, weight, bias))

    def add_experts(self, hidden: Hidden, x: Tensor, router: Tensor, experts: Experts) -> None:
        """See `Ops.add_experts`."""
        value, rows = self.settle(hidden), x.shape[0]
        if not rows:
            return
        config = choose_scores(rows, x.shape[1]) if x.element_size() == 2 else None
        scores = F.linear(x, router) if config is None else product(x, router, config, pdl=self._uses_pdl(x))
        tiles = choose_tiles(rows * experts.num_chosen, len(router), x.element_size())
        scores = scores.view(-1, rows, len(router))
        hidden.value, hidden.parts = value, experts_parts(x, scores, experts, tiles, pdl=self._uses_pdl(x))

    def settle(self, hidden: Hidden) -> Tensor:
        """See `Ops.settle`."""
        if hidden.parts is not None:
            hidden.value.copy_(hidden.parts.sum(0, dtype=torch.float32).add_(hidden.value))
            hidden.parts = None
        return hidden.value

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
        x: Tensor | Hidden,
        weight: Tensor,
        bias: Tensor | None,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
        gate: Activation | None = None,
    ) -> Tensor | None:
        """A product by a kernel of this package, with all that stands around it; None: the library's is faster."""
        if isinstance(x, Hidden) and norm is None:
            x = self.settle(x)
        value, is_gated = x.value if isinstance(x, Hidden) else x, gate is not None
        rows, (lines, inputs) = value.shape[0], weight.shape
        compute: Callable[..., Tensor]
        fuses_norm = True
        if rows <= 2 or (rows <= GEMV_ROWS and lines < WIDE_LINES):
            outputs = lines // 2 if is_gated else lines
            compute = partial(gemv, config=choose_gemv(rows, outputs, inputs, is_gated=is_gated), out=residual)
        else:
            config = choose_product(rows, lines, inputs, is_gated=is_gated)
            if config is None or value.element_size() > 2:  # no matrix unit multiplies float32, for checks, exactly
                return None
            compute, fuses_norm = partial(product, config=config), config.fuses_norm(inputs)
        if isinstance(x, Hidden) and norm is not None and (x.parts is not None or not fuses_norm):
            value, norm = self.normed(x, norm), None
        norm_weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        options = {"norm_weight": norm_weight, "eps": eps, "residual": residual, "gate": gate}
        return compute(value.contiguous(), weight, bias=bias, pdl=self._uses_pdl(value), **options)

    def normed(self, hidden: Hidden, norm: Norm | None) -> Tensor:
        """See `Ops.normed`."""
        if norm is None:
            return self.settle(hidden)
        value, parts, hidden.parts = hidden.value, hidden.parts, None
        return rms_norm(value, norm.weight, norm.eps, parts=parts, pdl=self._uses_pdl(value))

    def _uses_pdl(self, x: Tensor) -> bool:
        return self.has_pdl and x.shape[0] <= MAX_ROWS
