"""From a plan to numbers, and from numbers to tensors.

The numbers of a step cross to the device in one copy. They are laid out on the host when the step is launched; what
they are applied to (page table, last-token table, sampling table) is touched on the device only, in the order of the
steps, so that a step in flight never sees the next one's state.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from tokenmill.attention.base import AttentionBackend, RowLayout
from tokenmill.engine.kv_pool import DeviceState
from tokenmill.layers.batch import ForwardBatch
from tokenmill.ops.api import Ops
from tokenmill.sampling.adjust import Upload
from tokenmill.sampling.batch import Opening
from tokenmill.sched.plan import Row, StepPlan

LAST_SAMPLED = -1  # in place of a token id: take the slot's last token


@dataclass(frozen=True, slots=True)
class Sampled:
    """The rows of a step that draw a token, in the plan's order."""

    slots: list[int]
    positions: list[int]  # of the token before the one drawn

    @staticmethod
    def of(rows: Iterable[Row]) -> Sampled:
        """Those of `rows` that draw."""
        drawing = [row for row in rows if row.is_sampled]
        return Sampled([row.slot for row in drawing], [row.start + row.length - 1 for row in drawing])


def plan_openings(plan: StepPlan) -> list[Opening]:
    """The plan's openings as the sampling table takes them; of several for one slot, the last."""
    by_slot = {its.slot: its for its in plan.openings}
    return [Opening(its.slot, its.params, its.prompt_len, its.blocked_ids, its.history) for its in by_slot.values()]


def page_triples(plan: StepPlan, page_tables: Tensor) -> array[int]:
    """The plan's page updates as (row, index, page), three int32 each; of several for one entry, the last.

    A row is kind * slots + slot. They are written at once on the device, in no order.
    """
    slots = page_tables.shape[1]
    entries: dict[tuple[int, int], int] = {}
    for update in plan.page_updates:
        row = update.kind * slots + update.slot
        for index, page in enumerate(update.pages, update.first):
            entries[row, index] = page
    return array("i", [number for (row, index), page in entries.items() for number in (row, index, page)])


def stage_tokens(columns: Tensor, updates: Tensor, state: DeviceState, ops: Ops) -> tuple[Tensor, Tensor]:
    """`Ops.stage_tokens` on the engine's tables; `updates` as `page_triples` has them."""
    places = updates.view(-1, 3), state.last_tokens, state.page_tables
    return ops.stage_tokens(columns.view(3, -1), *places, state.page_size)


def padded_count(count: int) -> int:
    """Tokens that a GPU computes for so many: libraries take milliseconds at each new shape, so there are few."""
    granule = 1 if count <= 64 else 64 if count <= 1024 else 256
    return -(-count // granule) * granule


@dataclass(frozen=True, slots=True)
class StepColumns:
    """A step's rows as int32 columns."""

    tokens: tuple[array[int], array[int], array[int]]  # token ids or LAST_SAMPLED, positions, slots
    draws: tuple[array[int], array[int], array[int]]  # which token, slots, positions of the token before the drawn one

    @staticmethod
    def of(rows: Iterable[Row]) -> StepColumns:
        """The columns of rows in their order."""
        tokens, positions, slots = array("i"), array("i"), array("i")
        ends, drawing, lasts = array("i"), array("i"), array("i")
        for row in rows:
            tokens.extend((LAST_SAMPLED,) if row.token_ids is None else row.token_ids)
            positions.extend(range(row.start, row.start + row.length))
            slots += array("i", (row.slot,)) * row.length
            if row.is_sampled:
                ends.append(len(tokens) - 1)
                drawing.append(row.slot)
                lasts.append(row.start + row.length - 1)
        return StepColumns((tokens, positions, slots), (ends, drawing, lasts))

    def pad(self, num_tokens: int, num_draws: int, spare_slot: int) -> None:
        """Let tokens of the spare slot follow, and draws for it."""
        for columns, count, fillers in (
            (self.tokens, num_tokens, (0, 0, spare_slot)),
            (self.draws, num_draws, (0, spare_slot, 0)),
        ):
            for column, filler in zip(columns, fillers, strict=True):
                column.extend([filler] * (count - len(column)))

    def joined(self) -> array[int]:
        """All columns behind one another."""
        return sum((*self.tokens, *self.draws), array("i"))


def layout_of(rows: Sequence[Row]) -> RowLayout:
    """What attention needs to know of rows."""
    return RowLayout(
        slots=tuple(row.slot for row in rows),
        starts=tuple(row.start for row in rows),
        lengths=tuple(row.length for row in rows),
    )


def make_batch(
    plan: StepPlan,
    state: DeviceState,
    ops: Ops,
    attention: Sequence[AttentionBackend],
    upload: Upload,
    *,
    is_padded: bool = False,
) -> tuple[ForwardBatch, Tensor, Tensor]:
    """The tensors of one forward pass; slots and positions [sampled] int32 of the tokens whose logits are wanted.

    Page updates of the plan are applied. With `is_padded`, tokens of the spare slot follow, and draws for it.
    """
    columns = StepColumns.of(plan.rows)
    if is_padded:
        columns.pad(padded_count(len(columns.tokens[0])), padded_count(len(columns.draws[0])), state.spare_slot)
    num_tokens, num_draws = len(columns.tokens[0]), len(columns.draws[0])
    numbers = upload(columns.joined() + page_triples(plan, state.page_tables))
    tokens, draws = numbers[: 3 * num_tokens].view(3, -1), numbers[3 * num_tokens :][: 3 * num_draws].view(3, -1)
    input_ids, kv_slots = stage_tokens(tokens, numbers[3 * (num_tokens + num_draws) :], state, ops)
    layout, tables = layout_of(plan.rows), state.page_tables  # which what follows reads
    metadata = [its.plan(layout, table, state.page_size) for its, table in zip(attention, tables, strict=True)]
    return ForwardBatch(input_ids, tokens[1], kv_slots.unbind(0), draws[0], metadata), draws[1], draws[2]
