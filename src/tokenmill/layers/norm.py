"""Root-mean-square normalisation."""

from __future__ import annotations

from tokenmill.layers.build import Build, Source, Sources
from tokenmill.ops.api import Norm
from tokenmill.parallel.shard import Span


class RMSNorm:
    """Normalises [tokens, dim]; every rank has the whole weight. Mostly done by the product that follows."""

    def __init__(self, build: Build, dim: int) -> None:
        self.norm, self._offset = Norm(build.parameter(dim), build.spec.norm_eps), build.spec.norm_offset

    def sources(self, name: str) -> Sources:
        """Where the tensor called `name` goes."""
        weight = self.norm.weight
        return {f"{name}.weight": Source(weight, (weight.shape[0],), Span(0, weight.shape[0]), offset=self._offset)}
