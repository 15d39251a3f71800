"""The feed-forward part of a decoder layer."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.layers.build import Build, Sources
from tokenmill.layers.linear import ColumnParallelLinear, RowParallelLinear
from tokenmill.ops.api import Hidden, Norm
from tokenmill.parallel.shard import split_inner


@dataclass(frozen=True, slots=True)
class MLPNames:
    """What a checkpoint calls the projections."""

    gate: str
    up: str
    down: str


class GatedMLP:
    """down(activation(gate(x)) * up(x)) (Shazeer 2020); each rank has some of the inner dimensions."""

    def __init__(self, build: Build) -> None:
        spec, group = build.spec, build.group
        inner = spec.intermediate_size
        share = split_inner(inner, group.rank, group.size)
        parts = ((inner, share), (inner, share))
        self._ops, self._activation = build.ops, spec.activation
        self._gate_up = ColumnParallelLinear(build, spec.hidden_size, parts, bias=spec.mlp_bias)
        self._down = RowParallelLinear(build, inner, share, spec.hidden_size, bias=spec.mlp_bias)

    def __call__(self, hidden: Hidden, norms: tuple[Norm | None, Norm | None]) -> None:
        """Add the output for the hidden state to it; `norms` are those of input and output, where there are any."""
        joined = self._gate_up
        gated = self._ops.gated_linear(hidden, joined.weight, joined.bias, norm=norms[0], activation=self._activation)
        self._down(gated, hidden, norms[1])

    def sources(self, names: MLPNames) -> Sources:
        """Where the projections' tensors go."""
        return {**self._gate_up.sources((names.gate, names.up)), **self._down.sources(names.down)}
