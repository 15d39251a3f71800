"""From a plan to numbers, and from numbers to tensors.

The numbers of a step cross to the device in one copy. They are laid out on the host when the step is launched; what
they are applied to (page table, last-token table, sampling table) is touched on the device only, in the order of the
steps, so that a step in flight never sees the next one's state.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from tokenmill.attention.base import AttentionBackend, RowLayout, kv_slots_of
from tokenmill.engine.kv_pool import DeviceState
from tokenmill.layers.batch import ForwardBatch
from tokenmill.sampling.batch import Opening, SamplingTable, Upload
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


def enter_pages(page_table: Tensor, triples: Tensor) -> None:
    """Write page updates [updates, 3] to the page table [slots, pages]."""
    page_table.index_put_((triples[:, 0].long(), triples[:, 1].long()), triples[:, 2].to(page_table.dtype))


def open_slots(plan: StepPlan, state: DeviceState, table: SamplingTable, upload: Upload) -> None:
    """Bring a plan's openings and page updates to the device."""
    table.open(plan_openings(plan))
    if plan.page_updates:
        enter_pages(state.page_table, upload(page_triples(plan)).view(-1, 3))


def make_batch(
    plan: StepPlan, state: DeviceState, attention: AttentionBackend, upload: Upload
) -> tuple[ForwardBatch, Tensor, Tensor]:
    """The tensors of one forward pass; slots [sampled] that draw, and at which positions [sampled]; both int64.

    Updates of the plan are already applied.
    """
    rows = plan.rows
    layout = RowLayout(
        slots=tuple(row.slot for row in rows),
        starts=tuple(row.start for row in rows),
        lengths=tuple(row.length for row in rows),
    )
    tokens, positions, slots = array("i"), array("i"), array("i")
    ends, drawing, drawn_at = array("i"), array("i"), array("i")
    for row, end in zip(rows, accumulate(layout.lengths), strict=True):
        tokens.extend((LAST_SAMPLED,) if row.token_ids is None else row.token_ids)
        positions.extend(range(row.start, row.start + row.length))
        slots.extend([row.slot] * row.length)
        if row.is_sampled:
            ends.append(end - 1)
            drawing.append(row.slot)
            drawn_at.append(row.start + row.length)
    count, sampled = len(tokens), len(ends)
    staged = upload(tokens + positions + slots + ends + drawing + drawn_at)
    columns = staged[: 3 * count].view(3, count)
    batch = batch_of(columns, state, attention.plan(layout, state.page_table, state.kv.page_size))
    logits_indices, slots_drawing, positions_drawn = staged[3 * count :].view(3, sampled).long()
    return replace(batch, logits_indices=logits_indices), slots_drawing, positions_drawn


def batch_of(columns: Tensor, state: DeviceState, attention: object) -> ForwardBatch:
    """A batch from [3, tokens] int32 on the device: token ids or LAST_SAMPLED, positions, slots. All tokens draw."""
    tokens, positions, slots = columns.long()
    return ForwardBatch(
        input_ids=torch.where(tokens < 0, state.last_tokens[slots], tokens),
        positions=positions,
        kv_slots=kv_slots_of(slots, positions, state.page_table, state.kv.page_size),
        logits_indices=None,
        attention=attention,
    )
