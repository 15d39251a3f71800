"""Which graph a step with prompts gets, and when one is captured."""

from __future__ import annotations

from array import array

import pytest
import torch

from tests.support.graphs import RerunDevice
from tokenmill.engine.graphs import CaptureBudget, Draw
from tokenmill.engine.mixed import MixedGraphs, MixedSize


class Graphs(MixedGraphs):
    """Graphs that count their numbers up by one; time is what the test says, a capture takes 1 s."""

    def __init__(self, memory=1000):
        self.now, self.memory, self.order = 0.0, memory, []
        device = RerunDevice()
        budget = CaptureBudget(device, clock=lambda: self.now)
        super().__init__(self.compute, lambda size: array("i", [0] * size.tokens), MixedSize(2304, 256), device, budget)

    def compute(self, numbers, size, draw):
        if (size, draw) not in self.order:
            self.now += 1.0
            if len(self.order) == self.memory:
                raise torch.OutOfMemoryError("no")
            self.order.append((size, draw))
        return numbers + 1

    def size(self, *step, draw=Draw.PLAIN):
        graph = self.get(*step, draw)
        return graph and (graph.size.tokens, graph.size.rows)


def test_a_graph_has_room_for_the_step():
    graphs = Graphs()
    graphs.now = 1000.0
    assert graphs.size(64, 8) == (64, 8)
    assert graphs.size(65, 8) == (128, 8)
    assert graphs.size(300, 9) == (384, 32)
    assert graphs.size(2049, 256) == (2304, 256)
    assert graphs.size(2305, 1) is None
    assert graphs.size(10, 257) is None


def test_without_one_of_its_size_a_step_takes_one_up_to_twice_as_large_or_none():
    graphs = Graphs()
    graphs.now = -1000.0  # no capture is due
    assert graphs.size(500, 20) is None
    graphs.capture_next()
    assert graphs.order == [(MixedSize(512, 32), Draw.PLAIN)]
    assert graphs.size(500, 8) == (512, 32)
    assert graphs.size(300, 1) == (512, 32)
    assert graphs.size(256, 1) == (512, 32)
    assert graphs.size(250, 1, draw=Draw.FILTERED) is None
    assert graphs.size(200, 1) == (512, 32)
    assert graphs.size(100, 1) is None
    while graphs.has_missing():
        graphs.capture_next()
    assert graphs.size(100, 1) == (128, 8)
    assert graphs.size(250, 1, draw=Draw.FILTERED) == (256, 8)


def test_steps_wait_for_captures_for_a_share_of_the_time_only():
    graphs = Graphs()
    for tokens in range(60, 2000, 10):
        graphs.now += 0.05
        graphs.size(tokens, 8)
    assert 1 <= len(graphs.order) <= 0.15 * graphs.now + 1


def test_no_memory_ends_captures_and_nothing_else(caplog):
    graphs = Graphs(memory=1)
    graphs.now = 1000.0
    assert graphs.size(60, 8) == (64, 8)
    assert graphs.size(600, 8) is None
    assert not graphs.has_missing()
    assert graphs.size(60, 8) == (64, 8)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize("tokens", [64, 2304])
def test_a_replay_computes_what_it_is_given(tokens):
    graphs = Graphs()
    graphs.now = 1000.0
    graph = graphs.get(tokens, 1, Draw.PLAIN)
    assert graphs.replay(graph, array("i", range(tokens))).tolist() == list(range(1, tokens + 1))
