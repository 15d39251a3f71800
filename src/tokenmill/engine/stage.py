"""From a plan to numbers, and from numbers to tensors.

The numbers of a step cross to the device in one copy. They are laid out on the host when the step is launched; what
they are applied to (page table, last-token table, sampling table) is touched on the device only, in the order of the
steps, so that a step in flight never sees the next one's state.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from tokenmill.attention.base import AttentionBackend, RowLayout
from tokenmill.engine.kv_pool import DeviceState
from tokenmill.layers.batch import ForwardBatch
from tokenmill.ops.api import Ops
from tokenmill.sampling.batch import Opening, Upload
from tokenmill.sched.plan import Row, StepPlan

LAST_SAMPLED = -1  # in place of a token id: take the slot's last token


@dataclass(frozen=True, slots=True)
class Sampled:
    """The rows of a step that draw a token, in the plan's order."""

    slots: list[int]
    positions: list[int]  # of the token drawn

    @staticmethod
    def of(rows: Iterable[Row]) -> Sampled:
        """Those of `rows` that draw."""
        drawing = [row for row in rows if row.is_sampled]
        return Sampled([row.slot for row in drawing], [row.start + row.length for row in drawing])


def plan_openings(plan: StepPlan) -> list[Opening]:
    """The plan's openings as the sampling table takes them; of several for one slot, the last."""
    by_slot = {its.slot: its for its in plan.openings}
    return [(its.slot, its.params, its.prompt_len, its.blocked_ids) for its in by_slot.values()]


def page_triples(plan: StepPlan) -> array[int]:
    """The plan's page updates as (slot, index, page), three int32 each; of several for one entry, the last.

    They are written at once on the device, in no order.
    """
    entries: dict[tuple[int, int], int] = {}
    for update in plan.page_updates:
        for index, page in enumerate(update.pages, update.first):
            entries[update.slot, index] = page
    return array("i", [number for (slot, index), page in entries.items() for number in (slot, index, page)])


def stage_tokens(columns: Tensor, updates: Tensor, state: DeviceState, ops: Ops) -> tuple[Tensor, Tensor]:
    """`Ops.stage_tokens` on the engine's tables; `updates` as `page_triples` has them."""
    places = updates.view(-1, 3), state.last_tokens, state.page_table
    return ops.stage_tokens(columns.view(3, -1), *places, state.kv.page_size)


def padded_count(count: int) -> int:
    """Tokens that a GPU computes for so many: libraries take milliseconds at each new shape, so there are few."""
    granule = 1 if count <= 64 else 64 if count <= 1024 else 256
    return -(-count // granule) * granule


def make_batch(
    plan: StepPlan,
    state: DeviceState,
    ops: Ops,
    attention: AttentionBackend,
    upload: Upload,
    *,
    is_padded: bool = False,
) -> tuple[ForwardBatch, Tensor, Tensor]:
    """The tensors of one forward pass; slots and positions [sampled] int32 of the tokens whose logits are wanted.

    Page updates of the plan are applied. With `is_padded`, tokens of the spare slot follow, and draws for it.
    """
    rows = plan.rows
    layout = RowLayout(
        slots=tuple(row.slot for row in rows),
        starts=tuple(row.start for row in rows),
        lengths=tuple(row.length for row in rows),
    )
    tokens, positions, slots = array("i"), array("i"), array("i")
    ends, drawing, lasts = array("i"), array("i"), array("i")
    for row, end in zip(rows, accumulate(layout.lengths), strict=True):
        tokens.extend((LAST_SAMPLED,) if row.token_ids is None else row.token_ids)
        positions.extend(range(row.start, row.start + row.length))
        slots.extend([row.slot] * row.length)
        if row.is_sampled:
            ends.append(end - 1)
            drawing.append(row.slot)
            lasts.append(row.start + row.length - 1)
    if is_padded:
        _pad((tokens, positions, slots), (0, 0, state.spare_slot))
        _pad((ends, drawing, lasts), (0, state.spare_slot, 0))
    updates = page_triples(plan)
    numbers = upload(tokens + positions + slots + updates + ends + drawing + lasts)
    end_of_tokens, end_of_updates = 3 * len(tokens), 3 * len(tokens) + len(updates)
    columns = numbers[:end_of_tokens].view(3, -1)
    input_ids, kv_slots = stage_tokens(columns, numbers[end_of_tokens:end_of_updates], state, ops)
    metadata = attention.plan(layout, state.page_table, state.kv.page_size)  # reads the page table
    logits_indices, drawing_slots, last_positions = numbers[end_of_updates:].view(3, -1)
    batch = ForwardBatch(input_ids, columns[1], kv_slots, logits_indices, metadata)
    return batch, drawing_slots, last_positions


def _pad(columns: tuple[array[int], ...], fillers: tuple[int, ...]) -> None:
    spare = padded_count(len(columns[0])) - len(columns[0])
    for column, filler in zip(columns, fillers, strict=True):
        column.extend([filler] * spare)
