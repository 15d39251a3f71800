"""From a plan to tensors. Runs on the stream, in the order of the steps, so that nothing in flight is touched."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from tokenmill.attention.base import AttentionBackend, RowLayout, kv_slots_of
from tokenmill.engine.kv_pool import DeviceState
from tokenmill.layers.batch import ForwardBatch
from tokenmill.sampling.batch import SamplingTable
from tokenmill.sched.plan import StepPlan


def apply_updates(plan: StepPlan, state: DeviceState, table: SamplingTable) -> None:
    """Open slots and enter pages."""
    for opening in plan.openings:
        table.open(opening.slot, opening.params, opening.prompt_len, opening.blocked_ids)
    for update in plan.page_updates:
        pages = torch.tensor(update.pages, dtype=torch.int64, device=state.page_table.device)
        state.page_table[update.slot, update.first : update.first + len(update.pages)] = pages


def make_batch(plan: StepPlan, state: DeviceState, attention: AttentionBackend) -> ForwardBatch:
    """The tensors of one forward pass; updates of the plan are already applied."""
    rows = plan.rows
    layout = RowLayout(
        slots=tuple(row.slot for row in rows),
        starts=tuple(row.start for row in rows),
        lengths=tuple(row.length for row in rows),
    )
    ends = list(accumulate(layout.lengths))
    device = state.page_table.device
    positions = [p for row in rows for p in range(row.start, row.start + row.length)]
    at = torch.tensor(positions, device=device)
    slots = torch.tensor([row.slot for row in rows for _ in range(row.length)], device=device)
    return ForwardBatch(
        input_ids=_input_ids(plan, state, ends),
        positions=at,
        kv_slots=kv_slots_of(slots, at, state.page_table, state.kv.page_size),
        logits_indices=torch.tensor(
            [end - 1 for row, end in zip(rows, ends, strict=True) if row.is_sampled], dtype=torch.int64, device=device
        ),
        attention=attention.plan(layout, state.page_table, state.kv.page_size),
    )


def _input_ids(plan: StepPlan, state: DeviceState, ends: list[int]) -> Tensor:
    """The rows' ids; those marked "last sampled" come from the last-token table."""
    ids: list[int] = []
    indices: list[int] = []
    slots: list[int] = []
    for row, end in zip(plan.rows, ends, strict=True):
        if row.token_ids is None:
            indices.append(end - 1)
            slots.append(row.slot)
            ids.append(0)
        else:
            ids.extend(row.token_ids)
    device = state.last_tokens.device
    input_ids = torch.tensor(ids, dtype=torch.int64, device=device)
    if slots:
        input_ids[torch.tensor(indices, device=device)] = state.last_tokens[torch.tensor(slots, device=device)]
    return input_ids
