"""Root-mean-square normalisation."""

from __future__ import annotations

from torch import Tensor

from tokenmill.layers.build import Build, Source, Sources
from tokenmill.parallel.shard import Span


class RMSNorm:
    """Normalises [tokens, dim]; every rank has the whole weight."""

    def __init__(self, build: Build, dim: int) -> None:
        self._ops, self._eps = build.ops, build.spec.norm_eps
        self.weight = build.parameter(dim)

    def __call__(self, x: Tensor) -> Tensor:
        """The normalised x [tokens, dim]."""
        return self._ops.rms_norm(x, self.weight, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(normalised x + residual, x + residual), both [tokens, dim]."""
        return self._ops.add_rms_norm(x, residual, self.weight, self._eps)

    def sources(self, name: str) -> Sources:
        """Where the tensor called `name` goes."""
        dim = self.weight.shape[0]
        return {f"{name}.weight": Source(self.weight, (dim,), Span(0, dim))}
