"""Which part of a model each rank holds, in plain ints."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.errors import ConfigError
from tokenmill.spec import ModelSpec

UNITS = (64, 32, 16, 8, 4, 2, 1)


@dataclass(frozen=True, slots=True)
class Span:
    """The half-open range start .. stop of something that is split over ranks."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many it holds."""
        return self.stop - self.start

    def moved(self, by: int) -> Span:
        """The same number of them, `by` further on."""
        return Span(self.start + by, self.stop + by)

    def scaled(self, unit: int) -> Span:
        """The same range counted in parts of a `unit`-th."""
        return Span(self.start * unit, self.stop * unit)


def split_evenly(total: int, rank: int, size: int, what: str) -> Span:
    """Rank `rank`'s equal share of `total`.

    Raises:
        ConfigError: `total` (of `what`, as in "attention heads") does not divide by `size`.
    """
    if total % size:
        raise ConfigError(f"{total} {what} cannot be split over {size} ranks")
    share = total // size
    return Span(rank * share, (rank + 1) * share)


def split_inner(total: int, rank: int, size: int) -> Span:
    """Rank `rank`'s share of `total` inner dimensions, in units that suit kernels where it cannot be equal.

    Raises:
        ConfigError: there are more ranks than dimensions.
    """
    unit = next((its for its in UNITS if total % its == 0 and total // its >= size), 0)
    if not unit:
        raise ConfigError(f"{total} inner dimensions cannot be split over {size} ranks")
    if total % size == 0:
        return split_evenly(total, rank, size, "inner dimensions")
    count = total // unit
    return Span(rank * count // size, (rank + 1) * count // size).scaled(unit)


def check_size(spec: ModelSpec, size: int) -> None:
    """Raises ConfigError when the model cannot be split over `size` ranks, with the sizes that can be."""
    try:
        _try_size(spec, size)
    except ConfigError as error:
        found = [str(other) for other in range(1, spec.num_heads + 1) if _can_be(spec, other)]
        raise ConfigError(f"{error.message}: for this model, --tp can be {', '.join(found)}") from None


def _try_size(spec: ModelSpec, size: int) -> None:
    split_kv_heads(spec.num_heads, spec.num_kv_heads, 0, size)
    experts = (spec.experts.size, spec.experts.shared_size) if spec.experts else ()
    for inner in (spec.intermediate_size, *experts):
        split_inner(inner or size, 0, size)


def _can_be(spec: ModelSpec, size: int) -> bool:
    try:
        _try_size(spec, size)
    except ConfigError:
        return False
    return True


def split_kv_heads(num_heads: int, num_kv_heads: int, rank: int, size: int) -> Span:
    """The K/V heads that rank `rank`'s equal share of the query heads needs.

    With more ranks than K/V heads, neighbouring ranks hold copies of the same head.

    Raises:
        ConfigError: query or K/V heads do not divide.
    """
    split_evenly(num_heads, rank, size, "attention heads")
    if size <= num_kv_heads:
        return split_evenly(num_kv_heads, rank, size, "K/V heads")
    if size % num_kv_heads:
        raise ConfigError(f"{num_kv_heads} K/V heads cannot be shared by {size} ranks")
    head = rank * num_kv_heads // size
    return Span(head, head + 1)


def split_vocabulary(vocab_size: int, rank: int, size: int) -> tuple[Span, int]:
    """Rank `rank`'s token ids, and the rows that every rank allocates for its share (the last ones may be padding)."""
    rows = -(-vocab_size // size)
    return Span(min(rank * rows, vocab_size), min((rank + 1) * rows, vocab_size)), rows
