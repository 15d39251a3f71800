"""The feed-forward part of a decoder layer."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.layers.build import Build, Sources
from tokenmill.layers.linear import ColumnParallelLinear, RowParallelLinear
from tokenmill.ops.api import Hidden, Norm
from tokenmill.parallel.shard import split_evenly


@dataclass(frozen=True, slots=True)
class MLPNames:
    """What a checkpoint calls the projections."""

    gate: str
    up: str
    down: str


class GatedMLP:
    """down(silu(gate(x)) * up(x)) (Shazeer 2020); each rank has some of the inner dimensions."""

    def __init__(self, build: Build) -> None:
        spec, group = build.spec, build.group
        inner = spec.intermediate_size
        share = split_evenly(inner, group.rank, group.size, "intermediate dimensions")
        parts = ((inner, share), (inner, share))
        self._ops = build.ops
        self._gate_up = ColumnParallelLinear(build, spec.hidden_size, parts, bias=spec.mlp_bias)
        self._down = RowParallelLinear(build, inner, share, spec.hidden_size, bias=spec.mlp_bias)

    def __call__(self, hidden: Hidden, norm: Norm) -> None:
        """Add the output for the normalised hidden state to it."""
        joined = self._gate_up
        self._down(self._ops.gated_linear(hidden, joined.weight, joined.bias, norm=norm), hidden)

    def sources(self, names: MLPNames) -> Sources:
        """Where the projections' tensors go."""
        return {**self._gate_up.sources((names.gate, names.up)), **self._down.sources(names.down)}
