"""Linear layers split over ranks, one way or the other (Megatron-LM, Shoeybi et al. 2019)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tokenmill.layers.build import Build, Source, Sources
from tokenmill.ops.api import Hidden, Norm
from tokenmill.parallel.shard import Span


class ColumnParallelLinear:
    """Several linear layers with one input, joined into one; each rank computes some outputs of every one.

    `parts` are (outputs in all, this rank's outputs) of each; the result is [tokens, this rank's outputs].
    """

    def __init__(self, build: Build, inputs: int, parts: Sequence[tuple[int, Span]], *, bias: bool) -> None:
        outputs = sum(span.size for _, span in parts)
        self._ops = build.ops
        self._parts = tuple(parts)
        self.weight = build.parameter(outputs, inputs)
        self.bias = build.parameter(outputs) if bias else None

    def __call__(self, hidden: Hidden, norm: Norm) -> Tensor:
        """The product of the normalised hidden state: [tokens, this rank's outputs]."""
        return self._ops.normed_linear(hidden, self.weight, self.bias, norm=norm)

    def sources(self, names: Sequence[str]) -> Sources:
        """Where the parts' tensors go; `names` are the parts', in order."""
        found: dict[str, Source] = {}
        first, inputs = 0, self.weight.shape[1]
        for name, (total, span) in zip(names, self._parts, strict=True):
            place = slice(first, first + span.size)
            found[f"{name}.weight"] = Source(self.weight[place], (total, inputs), span)
            if self.bias is not None:
                found[f"{name}.bias"] = Source(self.bias[place], (total,), span)
            first += span.size
        return found


class RowParallelLinear:
    """A linear layer of which each rank has some inputs; the results are summed over the ranks."""

    def __init__(self, build: Build, inputs: int, share: Span, outputs: int, *, bias: bool) -> None:
        self._ops, self._group = build.ops, build.group
        self._inputs, self._share = inputs, share
        self.weight = build.parameter(outputs, share.size)
        self.bias = build.parameter(outputs) if bias else None

    def __call__(self, x: Tensor, hidden: Hidden) -> None:
        """Add the product of x [tokens, this rank's inputs] to the hidden state, the same on every rank."""
        if self._group.rank == 0:
            self._ops.add_linear(hidden, x, self.weight, self.bias)
        else:  # the sum must hold bias and hidden state once
            hidden.value = self._ops.linear(x, self.weight)
        if self._group.size > 1:
            hidden.value = self._group.all_reduce(self._ops.settle(hidden))

    def sources(self, name: str) -> Sources:
        """Where the tensors called `name` go."""
        outputs = self.weight.shape[0]
        rows = Span(0, outputs)
        found = {f"{name}.weight": Source(self.weight, (outputs, self._inputs), rows, self._share)}
        if self.bias is not None:
            found[f"{name}.bias"] = Source(self.bias, (outputs,), rows)
        return found
