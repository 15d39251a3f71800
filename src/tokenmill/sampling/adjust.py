"""What changes logits before the draw: ids favoured or forbidden, bad words, penalties for repetition."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Upload = Callable[["array[int]"], Tensor]  # int32 numbers to a tensor on the device

LAST_RESORT = -1e30  # the logit of an id that is drawn only where all others are forbidden
FORBIDDEN = float("-inf")


def most_bytes(num_slots: int, vocab_size: int) -> int:
    """Device memory that requests may make this take: two `SlotRows`, one of them growing, and logits in float32."""
    return 4 * num_slots * vocab_size * 4


class SlotRows:
    """A row as wide as the vocabulary for each slot that needs one; the tensor of them doubles when it is full."""

    def __init__(self, vocab_size: int, dtype: torch.dtype, upload: Upload) -> None:
        self._upload = upload
        self._values = torch.zeros(0, vocab_size, dtype=dtype, device=upload(array("i")).device)
        self._rows: dict[int, int] = {}
        self._free: list[int] = []

    def open(self, slot: int) -> Tensor:
        """The slot's row [vocab], of zeros."""
        if slot not in self._rows:
            if not self._free:
                old = self._values
                size = max(1, len(old))
                self._values = torch.cat((old, torch.zeros(size, old.shape[1], dtype=old.dtype, device=old.device)))
                self._free = list(range(len(old), len(old) + size))
            self._rows[slot] = self._free.pop()
        return self._values[self._rows[slot]].zero_()

    def pop(self, slot: int, default: None) -> None:
        """The slot needs no row any more, if it had one."""
        if slot in self._rows:
            self._free.append(self._rows.pop(slot))

    def has_any(self, slots: Sequence[int]) -> bool:
        """Whether any of the slots has a row."""
        return bool(self._rows) and not self._rows.keys().isdisjoint(slots)

    def find(self, slots: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Of those that have rows: places in `slots`, the slots, and their rows; each [found] int64."""
        found = [(place, slot, self._rows[slot]) for place, slot in enumerate(slots) if slot in self._rows]
        places, numbers, rows = self._upload(array("i", [n for its in found for n in its])).view(-1, 3).long().unbind(1)
        return places, numbers, rows

    def take(self, rows: Tensor) -> Tensor:
        """Copies of rows: [rows, vocab]."""
        return self._values.index_select(0, rows)

    def add(self, rows: Tensor, ids: Tensor, amount: int) -> None:
        """Add to one number of each row; ids are [rows]."""
        self._values.view(-1).index_add_(
            0, rows * self._values.shape[1] + ids, torch.full_like(rows, amount, dtype=self._values.dtype)
        )


def penalise(logits: Tensor, counts: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor) -> Tensor:
    """Logits with less for ids that were there before, as in Keskar et al. 2019 (repetition) and OpenAI's API.

    Args:
        logits: [rows, vocab] float32.
        counts: [rows, vocab] int32: twice how often an id is in the output, and 1 more if it is in the prompt.
        repetition: [rows, 1], as are the others.
        frequency: for each time in the output.
        presence: for being in the output.
    """
    times = counts >> 1
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    return torch.where(counts > 0, repeated, logits) - times * frequency - (times > 0) * presence


class BadSequences:
    """Sequences of ids of one slot, of which the last is forbidden while the output ends with those before it."""

    def __init__(self, sequences: Sequence[Sequence[int]], output: Sequence[int], upload: Upload) -> None:
        longest = max(map(len, sequences)) - 1
        any_id, no_id = [-1], [-2]
        rows = [any_id * (longest + 1 - len(ids)) + list(ids) for ids in sequences]
        numbers = upload(array("i", [token for row in rows for token in row])).view(-1, longest + 1).long()
        self._beginnings, self._lasts = numbers[:, :-1], numbers[:, -1]  # [sequences, longest], [sequences]
        known = list(output)[-longest:]
        self._tail = upload(array("i", no_id * (longest - len(known)) + known)).long()  # [longest]

    def forbid(self, logits: Tensor) -> None:
        """In place; logits are [vocab] float32."""
        begins = ((self._beginnings == self._tail) | (self._beginnings < 0)).all(1)
        logits.scatter_reduce_(0, self._lasts, torch.where(begins, LAST_RESORT, float("inf")), "amin")

    def append(self, drawn: Tensor) -> None:
        """An id [1] int64 was drawn."""
        self._tail = torch.cat((self._tail[1:], drawn))
