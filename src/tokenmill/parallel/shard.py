"""Which part of a model each rank holds, in plain ints."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.errors import ConfigError


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
        raise ConfigError(f"{total} {what} cannot be split over {size} ranks: choose a number of ranks that divides it")
    share = total // size
    return Span(rank * share, (rank + 1) * share)


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
        raise ConfigError(f"{num_kv_heads} K/V heads cannot be shared by {size} ranks: choose a multiple of the heads")
    head = rank * num_kv_heads // size
    return Span(head, head + 1)


def split_vocabulary(vocab_size: int, rank: int, size: int) -> tuple[Span, int]:
    """Rank `rank`'s token ids, and the rows that every rank allocates for its share (the last ones may be padding)."""
    rows = -(-vocab_size // size)
    return Span(min(rank * rows, vocab_size), min((rank + 1) * rows, vocab_size)), rows
