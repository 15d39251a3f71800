"""Plans to tensors: what a slot held before never shows, and rows that wait for a draw get it."""

from __future__ import annotations

from array import array

import pytest
import torch

from tests.sched.support import make_config
from tokenmill.attention.base import RowLayout
from tokenmill.engine.kv_pool import allocate
from tokenmill.engine.stage import make_batch, padded_count, page_triples, plan_openings
from tokenmill.ops.reference import ReferenceOps
from tokenmill.sampling.batch import Opening, SamplingTable
from tokenmill.sched.plan import PageUpdate, Row, SlotOpening, StepPlan
from tokenmill.spec import ModelSpec
from tokenmill.types import SamplingParams

SPEC = ModelSpec("llama", 100, 8, 16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4, max_position=64)


OPS = ReferenceOps()


def upload(numbers: array) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


class LayoutOnly:
    """An attention backend whose metadata is what it was asked for."""

    def plan(self, layout, page_table, page_size):
        return layout, page_table, page_size


@pytest.fixture
def state():
    return allocate(make_config(num_pages=16, max_running=3), SPEC, SPEC.num_kv_heads, torch.device("cpu"))


@pytest.fixture
def table():
    return SamplingTable(3, 32, upload)


def test_rows_become_tokens_in_order(state):
    state.last_tokens[:3] = torch.tensor([70, 71, 72])
    rows = (
        Row(5, 2, 9, 1, None, True),
        Row(6, 0, 4, 3, (10, 11, 12), False),
        Row(7, 1, 0, 2, (20, 21), True),
    )
    state.page_tables[0, 0, :2], state.page_tables[0, 1, 0], state.page_tables[0, 2, 2] = torch.tensor([8, 3]), 5, 6
    batch, slots, positions = make_batch(StepPlan(0, rows), state, OPS, [LayoutOnly()], upload)
    assert (slots.tolist(), positions.tolist()) == ([2, 1], [9, 1])
    assert batch.kv_slots[0].tolist() == [6 * 4 + 1, 3 * 4, 3 * 4 + 1, 3 * 4 + 2, 5 * 4, 5 * 4 + 1]
    assert batch.input_ids.tolist() == [72, 10, 11, 12, 20, 21]
    assert batch.positions.tolist() == [9, 4, 5, 6, 0, 1]
    assert batch.logits_indices.tolist() == [0, 5]
    ((layout, page_table, page_size),) = batch.attention
    assert layout == RowLayout(slots=(2, 0, 1), starts=(9, 4, 0), lengths=(1, 3, 2))
    assert torch.equal(page_table, state.page_tables[0])
    assert page_size == 4


def test_padding_follows_the_rows_and_belongs_to_the_spare_slot(state):
    state.page_tables[0, 0, :10], state.page_tables[0, 1, :10] = torch.arange(10), torch.tensor([12] * 10)
    rows = Row(7, 0, 0, 40, tuple(range(40)), True), Row(8, 1, 0, 30, tuple(range(30)), False)
    batch, slots, positions = make_batch(StepPlan(0, rows), state, OPS, [LayoutOnly()], upload, is_padded=True)
    assert batch.input_ids.tolist() == [*range(40), *range(30), *[0] * 58]
    assert batch.kv_slots[0].tolist()[:40] == list(range(40))
    assert batch.kv_slots[0].tolist()[70:] == [16 * 4] * 58
    assert batch.attention[0][0].lengths == (40, 30)
    assert (batch.logits_indices.tolist(), slots.tolist(), positions.tolist()) == ([39], [0], [39])


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 128, 1000, 1025, 8192, 8193])
def test_padding_is_small_and_the_shapes_are_few(count):
    padded = padded_count(count)
    assert count <= padded < count + 256
    assert padded - count < max(64, count / 4)
    assert padded_count(padded) == padded


def test_a_step_that_draws_nothing_has_no_logits(state):
    batch, _, _ = make_batch(StepPlan(0, (Row(1, 0, 0, 2, (5, 6), False),)), state, OPS, [LayoutOnly()], upload)
    assert batch.logits_indices.tolist() == []


def test_page_updates_apply_in_order_to_their_slots_alone(state):
    before = state.page_tables[0].clone()
    updates = (PageUpdate(1, 0, (3, 4, 5)), PageUpdate(1, 1, (9,)), PageUpdate(2, 2, (7,)))
    make_batch(StepPlan(0, (), (), updates), state, OPS, [LayoutOnly()], upload)
    assert state.page_tables[0, 1, :3].tolist() == [3, 9, 5]
    assert state.page_tables[0, 2, 2] == 7
    assert torch.equal(state.page_tables[0, 0], before[0])
    triples = page_triples(StepPlan(0, (), (), updates), state.page_tables)
    assert sorted(zip(*[iter(triples)] * 3, strict=True)) == [(1, 0, 3), (1, 1, 9), (1, 2, 5), (2, 2, 7)]
    make_batch(StepPlan(1, (), (), (PageUpdate(1, 0, (8,)),)), state, OPS, [LayoutOnly()], upload)
    assert state.page_tables[0, 1, :3].tolist() == [8, 9, 5]


def test_a_slot_that_is_opened_again_has_the_new_parameters_only(table):
    old = SamplingParams(
        temperature=2.0,
        top_k=7,
        top_p=0.5,
        min_p=0.1,
        seed=9,
        logit_bias={3: 5.0},
        min_tokens=4,
        repetition_penalty=2.0,
        bad_words=[[4, 5], [6]],
    )
    table.open(plan_openings(StepPlan(0, (), (SlotOpening(1, 5, old, 2, (8,), array("i", (1, 2)).tobytes()),))))
    assert not table.is_greedy_slot(1)
    assert table.is_filtered_slot(1)
    table.open(plan_openings(StepPlan(1, (), (SlotOpening(1, 6, SamplingParams(temperature=0, seed=4), 2, ()),))))
    assert table.is_greedy_slot(1)
    assert not table.is_filtered_slot(1)
    fresh = SamplingTable(3, 32, upload)
    fresh.open([Opening(1, SamplingParams(temperature=0, seed=4), 2, ())])
    for name in ("temperature", "top_k", "top_p", "min_p", "seed", "is_greedy", "penalties"):
        assert torch.equal(getattr(table, name), getattr(fresh, name)), name
    logits = torch.zeros(1, 32)
    table.adjust(logits, [1], [3])
    assert not logits.any()
