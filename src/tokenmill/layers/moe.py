"""Mixture of experts: the feed-forward part of a decoder layer of which each token uses a few pieces."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.layers.build import Build, Source, Sources
from tokenmill.layers.linear import ColumnParallelLinear, RowParallelLinear
from tokenmill.layers.mlp import MLPNames
from tokenmill.ops.api import Experts, Hidden, Norm
from tokenmill.parallel.shard import Span, split_inner
from tokenmill.spec import ExpertsSpec


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What a checkpoint calls the router, the experts (below their number), and the shared one with its gate."""

    router: str
    experts: str
    expert: MLPNames
    shared: str = "mlp.shared_expert"
    shared_gate: str = "mlp.shared_expert_gate"


class MixtureOfExperts:
    """Chosen experts' outputs, weighted (Shazeer et al. 2017); each rank has some inner dimensions of every expert."""

    def __init__(self, build: Build, spec: ExpertsSpec) -> None:
        group, hidden, num_experts = build.group, build.spec.hidden_size, spec.num_experts
        self._ops, self._group, self._spec = build.ops, group, spec
        self._share = share = split_inner(spec.size, group.rank, group.size)
        self._router = build.parameter(num_experts, hidden)
        self._experts = Experts(
            build.parameter(num_experts, 2 * share.size, hidden),
            build.parameter(num_experts, hidden, share.size),
            torch.zeros(num_experts + 1, dtype=torch.int32, device=build.device),
            spec.num_chosen,
            spec.is_renormalised,
        )
        self._shared = SharedExpert(build, spec) if spec.shared_size else None

    def __call__(self, hidden: Hidden, norms: tuple[Norm | None, Norm | None]) -> None:
        """Add the output for the hidden state to it, normalised by the first of `norms`."""
        norm, _ = norms
        assert norm is not None
        x = self._ops.normed(hidden, norm)
        inner = None if self._shared is None else self._shared.inner(hidden, norm)
        if self._group.rank:  # the sum must hold the hidden state once
            hidden.value = torch.zeros_like(x)
        self._ops.add_experts(hidden, x, self._router, self._experts)
        if self._group.size > 1:
            hidden.value = self._group.all_reduce(self._ops.settle(hidden))
        if self._shared is not None and inner is not None:
            self._shared.down(inner, hidden)

    def sources(self, names: ExpertNames) -> Sources:
        """Where the tensors go."""
        gate_up, down, share, size = self._experts.gate_up, self._experts.down, self._share, self._spec.size
        experts, outputs = Span(0, gate_up.shape[0]), Span(0, gate_up.shape[2])
        found = {f"{names.router}.weight": Source(self._router, tuple(self._router.shape), experts)}
        for number in range(experts.size):
            gate, up = gate_up[number].chunk(2)
            prefix, shape = f"{names.experts}.{number}", (size, outputs.size)
            found[f"{prefix}.{names.expert.gate}.weight"] = Source(gate, shape, share)
            found[f"{prefix}.{names.expert.up}.weight"] = Source(up, shape, share)
            found[f"{prefix}.{names.expert.down}.weight"] = Source(down[number], shape[::-1], outputs, share)
        return found if self._shared is None else {**found, **self._shared.sources(names)}


class SharedExpert:
    """The gated MLP that every token uses, scaled by the sigmoid of a product with the token where there is a gate."""

    def __init__(self, build: Build, spec: ExpertsSpec) -> None:
        group, hidden, size = build.group, build.spec.hidden_size, spec.shared_size
        share = split_inner(size, group.rank, group.size)
        self._ops = build.ops
        self._gate_up = ColumnParallelLinear(build, hidden, ((size, share), (size, share)), bias=False)
        self.down = RowParallelLinear(build, size, share, hidden, bias=False)
        self._gate = build.parameter(1, hidden) if spec.has_shared_gate else None

    def inner(self, hidden: Hidden, norm: Norm) -> Tensor:
        """What `down` takes: silu(gate) * up, scaled, of the normalised hidden state."""
        inner = self._ops.gated_linear(hidden, self._gate_up.weight, norm=norm)
        if self._gate is None:
            return inner
        return inner * self._ops.normed_linear(hidden, self._gate, norm=norm).sigmoid()

    def sources(self, names: ExpertNames) -> Sources:
        """Where the tensors go."""
        gate, up, down = (f"{names.shared}.{name}" for name in (names.expert.gate, names.expert.up, names.expert.down))
        found = {**self._gate_up.sources((gate, up)), **self.down.sources(down)}
        if self._gate is not None:
            found[f"{names.shared_gate}.weight"] = Source(self._gate, tuple(self._gate.shape), Span(0, 1))
        return found
