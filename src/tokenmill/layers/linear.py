"""Linear layers split over ranks, one way or the other (Megatron-LM, Shoeybi et al. 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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

    def __call__(self, hidden: Hidden, norm: Norm | None) -> Tensor:
        """The product of the hidden state, normalised if there is a norm: [tokens, this rank's outputs]."""
        return self._ops.normed_linear(hidden, self.weight, self.bias, norm=norm)

    def sources(self, names: Sequence[str]) -> Sources:
        """Where the parts' tensors go; `names` are the parts', in order. Parts of one name are one tensor's rows."""
        found: dict[str, Source] = {}
        first, inputs = 0, self.weight.shape[1]
        before = dict.fromkeys(names, 0)
        sizes = {
            name: sum(size for its, (size, _) in zip(names, self._parts, strict=True) if its == name) for name in names
        }
        for name, (size, span) in zip(names, self._parts, strict=True):
            place, rows = slice(first, first + span.size), span.moved(before[name])
            sources = {"weight": Source(self.weight[place], (sizes[name], inputs), rows)}
            if self.bias is not None:
                sources["bias"] = Source(self.bias[place], (sizes[name],), rows)
            for kind, source in sources.items():
                key, known = f"{name}.{kind}", found.get(f"{name}.{kind}")
                found[key] = source if known is None else replace(known, others=(*known.others, source))
            first += span.size
            before[name] += size
        return found


class RowParallelLinear:
    """A linear layer of which each rank has some inputs; the results are summed over the ranks."""

    def __init__(self, build: Build, inputs: int, share: Span, outputs: int, *, bias: bool) -> None:
        self._ops, self._group = build.ops, build.group
        self._inputs, self._share = inputs, share
        self.weight = build.parameter(outputs, share.size)
        self.bias = build.parameter(outputs) if bias else None

    def __call__(self, x: Tensor, hidden: Hidden, norm: Norm | None = None) -> None:
        """Add the product of x [tokens, this rank's inputs], normalised if there is a norm, to the hidden state.

        That is the same on every rank.
        """
        if norm is not None:
            product = self._group.all_reduce(
                self._ops.linear(x, self.weight, self.bias if self._group.rank == 0 else None)
            )
            self._ops.add_normed(hidden, product, norm)
            return
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
