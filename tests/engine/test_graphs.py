"""Which graph a step gets, and when one is captured."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
import torch

from tests.support.graphs import RerunDevice
from tokenmill.engine.graphs import (
    CAPTURE_SHARE,
    CaptureBudget,
    DecodeGraphs,
    Draw,
    batch_sizes,
    graph_bytes,
    most_graph_tokens,
)
from tokenmill.spec import ExpertsSpec, ModelSpec

SPARE_SLOT, SPARE_PAGE = 99, 77


class Graphs(DecodeGraphs):
    """Graphs whose output is their first column's sum over rows; time is what the test says, a capture takes 1 s."""

    def __init__(self, most, memory=1000):
        self.now, self.memory, self.order = 0.0, memory, []
        device = RerunDevice()
        budget = CaptureBudget(device, clock=lambda: self.now)
        super().__init__(self.compute, most, device, budget, spare_slot=SPARE_SLOT, spare_page=SPARE_PAGE)

    def compute(self, columns, updates, draw):
        rows = columns.shape[1]
        if (rows, draw) not in self.order:
            self.now += 1.0
            if len(self.order) == self.memory:
                raise torch.OutOfMemoryError("no")
            self.order.append((rows, draw))
        self.seen = columns.clone(), updates.clone()
        return columns.sum(0)

    def serve(self, seconds):
        self.now += seconds

    def batch(self, rows, draw=Draw.PLAIN):
        graph = self.get(rows, draw)
        return graph and graph.batch


@pytest.mark.parametrize("draw", Draw)
@pytest.mark.parametrize("most", [1, 2, 3, 5, 8, 9, 64, 100, 256])
def test_every_batch_has_a_size_that_holds_it_and_wastes_little(most, draw):
    sizes = batch_sizes(most, draw)
    assert sizes == sorted(set(sizes))
    for rows in range(1, most + 1):
        size = next(size for size in sizes if size >= rows)
        assert size - rows < 8 or draw is Draw.LOGITS
        assert size < 2 * rows or size == 1


def test_no_graphs():
    assert batch_sizes(0) == []


def test_a_step_without_a_graph_takes_a_larger_one_or_none():
    graphs = Graphs(64)
    assert graphs.batch(3) is None  # no time has passed of which a capture could take its share
    graphs.serve(0.1)
    assert [graphs.batch(3), graphs.batch(3)] == [64, 64]
    assert graphs.order == [(64, Draw.PLAIN)]
    graphs.capture_next()
    assert graphs.order[1:] == [(4, Draw.PLAIN)]
    assert graphs.batch(3) == 4
    assert graphs.batch(5) == 64


def test_steps_wait_for_captures_for_a_share_of_the_time_only():
    graphs = Graphs(256)
    served = 0.0
    for rows in list(range(256, 0, -1)) * 3:
        graphs.serve(0.1)
        served += 0.1
        before = len(graphs.order)
        assert graphs.batch(rows) is not None
        assert len(graphs.order) <= before + 1
        assert len(graphs.order) <= CAPTURE_SHARE * graphs.now + 1
    assert len(graphs.order) > 10
    while len(graphs.order) < len(batch_sizes(256)):
        graphs.serve(1.0)
        rows = next(size for size in batch_sizes(256) if (size, Draw.PLAIN) not in graphs.order)
        graphs.batch(rows)
    assert [graphs.batch(size) for size in batch_sizes(256)] == batch_sizes(256)


def test_idle_time_takes_what_was_asked_for_and_then_the_largest_and_is_not_counted():
    graphs = Graphs(16)
    graphs.serve(0.1)
    assert [graphs.batch(8), graphs.batch(2)] == [16, 16]
    while graphs.has_missing():
        graphs.capture_next()
    assert [rows for rows, _ in graphs.order] == [16, 2, 8, 4, 1]
    graphs.serve(10)
    assert graphs.batch(2, Draw.FILTERED) == 16
    assert graphs.order[-1] == (16, Draw.FILTERED)
    assert graphs.has_missing()


def test_ways_of_drawing_that_nobody_asked_for_have_no_graphs():
    graphs = Graphs(8)
    while graphs.has_missing():
        graphs.capture_next()
    assert {draw for _, draw in graphs.order} == {Draw.PLAIN}
    graphs.batch(1, Draw.LOGITS)
    while graphs.has_missing():
        graphs.capture_next()
    assert [rows for rows, draw in graphs.order if draw is Draw.LOGITS] == [8, 1, 4, 2]
    assert all(draw is not Draw.FILTERED for _, draw in graphs.order)


@pytest.mark.parametrize("memory", [0, 2])
def test_no_memory_ends_captures_and_nothing_else(memory, caplog):
    graphs = Graphs(16, memory)
    graphs.serve(100.0)
    assert graphs.batch(16) == (16 if memory else None)
    while graphs.has_missing():
        graphs.capture_next()
    assert len(graphs.order) == memory
    graphs.serve(100.0)
    assert graphs.batch(1) == (8 if memory else None)
    assert graphs.batch(16) == (16 if memory else None)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "--memory-fraction" in caplog.text


def test_rows_and_updates_that_lack_name_the_spare_slot():
    graphs = Graphs(4)
    graphs.capture_next()
    graph = graphs.get(3, Draw.PLAIN)
    columns = array("i", [5, -1, 7]), array("i", [10, 20, 30]), array("i", [0, 1, 2])
    output = graphs.replay(graph, columns, array("i", [1, 2, 3]))
    assert output.tolist() == [15, 20, 39, SPARE_SLOT]
    columns, updates = graphs.seen
    assert columns[:, 3].tolist() == [0, 0, SPARE_SLOT]
    assert updates.tolist() == [[1, 2, 3]] + [[SPARE_SLOT, 0, SPARE_PAGE]] * 67


def test_the_memory_set_aside_grows_with_what_is_captured():
    spec = ModelSpec("llama", 1000, 64, 128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, max_position=64)
    sizes = [graph_bytes(spec, most, 512, 2) for most in (0, 1, 8, 64, 256)]
    assert sizes[0] == 0
    assert sizes == sorted(set(sizes))
    assert graph_bytes(spec, 64, 512, 4) > graph_bytes(spec, 64, 512, 2)
    assert graph_bytes(spec, 64, 1024, 2) > graph_bytes(spec, 64, 512, 2)
    experts = replace(spec, experts=ExpertsSpec(num_experts=8, num_chosen=2, size=128))
    assert graph_bytes(experts, 64, 512, 2) > graph_bytes(spec, 64, 512, 2)


def test_steps_that_compute_for_long_get_no_graphs():
    small = ModelSpec("llama", 1000, 1024, 3072, 28, 16, 8, 128, 4096)
    large = replace(small, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32)
    assert large.weights_per_token() == 32 * 4096 * (80 * 128 + 3 * 14336)
    assert most_graph_tokens(small, 512) == 512
    assert most_graph_tokens(large, 512) < most_graph_tokens(small, 8192) < 8192
    sparse = replace(large, experts=ExpertsSpec(64, 2, 1024, shared_size=512, dense_layers=(0,)))
    assert sparse.weights_per_token() == 4096 * (32 * 80 * 128 + 3 * 14336 + 31 * 3 * (2 * 1024 + 512))
    assert most_graph_tokens(sparse, 8192) > most_graph_tokens(large, 8192)


@pytest.mark.parametrize("others", [True, False])
def test_graphs_are_captured_on_all_ranks_or_on_none(others):
    asked, captured = [], []

    def agree(wish):
        asked.append(wish)
        return wish and others

    budget = CaptureBudget(RerunDevice(), lambda: True, agree, clock=lambda: 0.0)
    assert budget.has_room is others
    found = budget.capture(lambda: captured.append(1) or torch.zeros(1), "1 rows", step_waits=False)
    assert (found is not None) is others
    assert asked == [True, True]
    asked.clear()
    assert budget.has_room is others
    assert asked == ([True] if others else [])


def test_a_rank_without_memory_keeps_the_others_from_a_graph():
    def fail():
        raise torch.OutOfMemoryError("no")

    wishes = []
    budget = CaptureBudget(RerunDevice(), lambda: True, lambda wish: wishes.append(wish) or wish)
    assert budget.capture(fail, "1 rows", step_waits=False) is None
    assert wishes == [False]
    assert not budget.has_room
