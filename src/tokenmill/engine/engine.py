"""The only owner of device memory: plans in, drawn ids out."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from tokenmill.attention.base import AttentionBackend, GraphAttention
from tokenmill.config import ResolvedConfig
from tokenmill.engine import stage
from tokenmill.engine.device import Device, GraphDevice, Pending, Work
from tokenmill.engine.graphs import DecodeGraphs, Draw, room
from tokenmill.engine.kv_pool import DeviceState, allocate
from tokenmill.layers.batch import ForwardBatch
from tokenmill.models.base import CausalLM
from tokenmill.ops.api import Ops
from tokenmill.sampling.base import Sampler
from tokenmill.sampling.batch import SamplingTable
from tokenmill.sampling.select import make_sampler
from tokenmill.sched.plan import StepPlan, StepResult
from tokenmill.trace import Tracer


@dataclass(frozen=True, slots=True)
class DecodeOrder:
    """How the rows of a decode step stand in a graph: longest context first.

    While the same requests decode together, step after step, it stays right: all grow alike. An outdated one costs
    time only.
    """

    slots: list[int]  # of the plan's rows
    rows: list[int]  # of the plan, as the graph takes them
    places: list[int]  # where each of the plan's rows stands


@dataclass(frozen=True, slots=True)
class Handle:
    """A step that was launched. `places` tells where each row's id stands; None: they are in the plan's order."""

    step: int
    pending: Pending
    places: list[int] | None

    def wait(self) -> StepResult:
        """Block until the step is done."""
        ids = self.pending.wait()
        return StepResult(self.step, tuple(ids if self.places is None else [ids[place] for place in self.places]))


class ModelEngine:
    """Runs a model step by step on one device. A `tracer` may be set between two steps."""

    def __init__(
        self, model: CausalLM, ops: Ops, attention: AttentionBackend, config: ResolvedConfig, device: Device
    ) -> None:
        self.config = config
        self.tracer: Tracer | None = None
        self._model, self._ops = model, ops
        self._attention = attention
        self._device = device
        self._state: DeviceState = allocate(config, model.spec, model.num_kv_heads, device.torch_device)
        self._table = SamplingTable(config.max_running + 1, device.upload)
        self._sampler: Sampler = make_sampler(self._table, model.spec, stage.padded_count(config.max_running + 8), ops)
        self._order = DecodeOrder([], [], [])
        self._graphs = self._make_graphs() if config.graph_max_batch and isinstance(attention, GraphAttention) else None

    def launch(self, plan: StepPlan) -> Handle:
        """Start a step and return at once; steps run in the order in which they are launched."""
        if self._graphs is None or not plan.is_decode or len(plan.rows) > self.config.graph_max_batch:
            return Handle(plan.step, self._submit(plan, partial(self._run_eagerly, plan)), None)
        order = self._order_rows(plan)
        return Handle(plan.step, self._submit(plan, partial(self._replay, plan, order)), order.places)

    def close(self) -> None:
        """Finish what was launched."""
        self._device.close()

    def prepare(self) -> bool:
        """See `Engine.prepare`: captures a graph."""
        if self._graphs is None or not self._graphs.has_missing():
            return False
        self._device.submit(self._graphs.capture_next).wait()
        return True

    def _submit(self, plan: StepPlan, work: Work) -> Pending:
        return self._device.submit(work if self.tracer is None else self.tracer.watch(plan.step, work))

    def _run_eagerly(self, plan: StepPlan) -> Tensor | None:
        state = self._state
        self._table.open(stage.plan_openings(plan))
        places = state, self._ops, self._attention, self._device.upload
        batch, slots, positions = stage.make_batch(plan, *places, is_padded=self.config.device == "cuda")
        if self.tracer is not None:
            self.tracer.forward(plan.step)
        logits = self._model.forward(batch, state.kv)
        sampled = stage.Sampled.of(plan.rows)
        if not sampled.slots:
            return None
        if self.config.debug_checks and not torch.isfinite(logits).all():
            raise RuntimeError(f"step {plan.step}: logits are not finite")
        if self.tracer is not None:
            self.tracer.enter("sample", plan.step)
        return self._draw(logits, slots, positions, sampled)[: len(sampled.slots)]

    def _draw(self, logits: Tensor, slots: Tensor, positions: Tensor, sampled: stage.Sampled) -> Tensor:
        if self._table.needs_adjusting(sampled.slots):
            logits = logits.float()
            self._table.adjust(logits, sampled.slots, sampled.positions)
        is_filtered = self._table.needs_filters(sampled.slots)
        return self._sampler.draw(logits, slots, positions, self._state.last_tokens, is_filtered=is_filtered)

    def _order_rows(self, plan: StepPlan) -> DecodeOrder:
        rows = plan.rows
        slots = [row.slot for row in rows]
        if plan.openings or slots != self._order.slots:
            order = sorted(range(len(rows)), key=lambda index: -rows[index].start)
            self._order = DecodeOrder(slots, order, sorted(range(len(rows)), key=order.__getitem__))
        return self._order

    def _replay(self, plan: StepPlan, order: DecodeOrder) -> Tensor | None:
        assert self._graphs is not None
        rows = [plan.rows[index] for index in order.rows]
        slots = array("i", [row.slot for row in rows])
        starts = array("i", [row.start for row in rows])
        self._table.open(stage.plan_openings(plan))
        is_adjusted = self._table.needs_adjusting(slots)
        draw = Draw.LOGITS if is_adjusted else Draw.FILTERED if self._table.needs_filters(slots) else Draw.PLAIN
        graph = self._graphs.get(len(rows), draw)
        if graph is None:
            return self._run_eagerly(replace(plan, rows=tuple(rows), openings=()))
        updates = stage.page_triples(plan)
        if len(updates) > 3 * room(graph):
            stage.stage_tokens(self._device.upload(array("i")), self._device.upload(updates), self._state, self._ops)
            updates = array("i")
        tokens = array("i", [stage.LAST_SAMPLED if row.token_ids is None else row.token_ids[0] for row in rows])
        if self.tracer is not None:
            self.tracer.forward(plan.step)
        output = self._graphs.replay(graph, (tokens, starts, slots), updates)[: len(rows)]
        if not is_adjusted:
            return output
        _, positions, on_device = graph.numbers[: 3 * graph.batch].view(3, -1)[:, : len(rows)]
        return self._draw(output, on_device, positions, stage.Sampled.of(rows))

    def _make_graphs(self) -> DecodeGraphs:
        assert isinstance(self._device, GraphDevice)
        assert isinstance(self._attention, GraphAttention)
        state, config = self._state, self.config
        backend = self._attention

        def body(columns: Tensor, updates: Tensor, draw: Draw) -> Tensor:
            input_ids, kv_slots = stage.stage_tokens(columns, updates, state, self._ops)
            _, positions, slots = columns
            metadata = backend.plan_decode(slots, positions, state.page_table, config.page_size)
            logits = self._model.forward(ForwardBatch(input_ids, positions, kv_slots, None, metadata), state.kv)
            if draw is Draw.LOGITS:
                return logits
            is_filtered = draw is Draw.FILTERED
            return self._sampler.draw(logits, slots, positions, state.last_tokens, is_filtered=is_filtered)

        return DecodeGraphs(
            body,
            config.graph_max_batch,
            self._device,
            spare_slot=state.spare_slot,
            spare_page=config.num_pages,
        )
