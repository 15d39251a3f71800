"""The only owner of device memory: plans in, drawn ids out."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from tokenmill.attention.base import AttentionBackend, GraphAttention, TableAttention
from tokenmill.config import ResolvedConfig
from tokenmill.engine import stage
from tokenmill.engine.device import Device, GraphDevice, Pending, Work
from tokenmill.engine.graphs import CaptureBudget, DecodeGraphs, Draw, most_graph_tokens, room
from tokenmill.engine.kv_pool import DeviceState, allocate
from tokenmill.engine.mixed import MixedGraphs, MixedSize
from tokenmill.engine.wishes import Pools, Wanted, WishBook
from tokenmill.errors import InvalidRequest
from tokenmill.layers.batch import ForwardBatch
from tokenmill.models.base import CausalLM
from tokenmill.ops.api import Hidden, Ops
from tokenmill.sampling.base import Sampler
from tokenmill.sampling.batch import SamplingTable
from tokenmill.sampling.grammar import NO_ID, Apply, GrammarTable, MatcherSource
from tokenmill.sampling.logprobs import ROWS_AT_ONCE, logprob_records
from tokenmill.sampling.select import make_sampler
from tokenmill.sched.plan import Row, StepPlan, StepResult
from tokenmill.trace import Tracer

CAPTURE_WAIT = 0.01  # seconds between two looks whether graphs may be captured


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

    plan: StepPlan
    pending: Pending
    places: list[int] | None
    wanted: Wanted | None
    verdict: Callable[[int], InvalidRequest | None]

    def wait(self) -> StepResult:
        """Block until the step is done."""
        numbers, wanted = self.pending.wait(), self.wanted
        ids = numbers if wanted is None else numbers[: wanted.num_drawn]
        ids = ids if self.places is None else [ids[place] for place in self.places]
        endings = {}
        if NO_ID in ids:
            drawing = [row for row in self.plan.rows if row.is_sampled]
            lacking = [row for row, token in zip(drawing, ids, strict=True) if token == NO_ID]
            endings = {row.uid: self.verdict(row.slot) for row in lacking}
        extras = wanted.split(numbers) if wanted else ({}, {}, {})
        return StepResult(self.plan.step, tuple(ids), *extras, endings)


class ModelEngine:
    """Runs a model step by step on one device. A `tracer` may be set between two steps.

    Of several ranks each has one. `agree` is whether all wish something: a graph is captured on every rank or on none,
    since its collectives wait for one another.
    """

    def __init__(
        self,
        model: CausalLM,
        ops: Ops,
        attention: Sequence[AttentionBackend],
        config: ResolvedConfig,
        device: Device,
        *,
        matchers: MatcherSource | None = None,
        apply_masks: Apply | None = None,
        may_capture: Callable[[], bool] = lambda: True,
        agree: Callable[[bool], bool] = lambda wish: wish,
        at_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = config
        self._may_capture, self._at_close, self._agree = may_capture, at_close, agree
        self.tracer: Tracer | None = None
        self._model, self._ops = model, ops
        self._attention = attention
        self._device = device
        self._state: DeviceState = allocate(config, model.spec, model.num_kv_heads, device.torch_device)
        self._table = SamplingTable(config.max_running + 1, model.spec.vocab_size, device.upload)
        self._grammars = GrammarTable(model.spec.vocab_size, device.upload, device.fetch, matchers, apply_masks)
        self._sampler: Sampler = make_sampler(self._table, model.spec, stage.padded_count(config.max_running + 8), ops)
        self._order = DecodeOrder([], [], [])
        self._book = WishBook()
        self._pools = Pools()
        self._graphs = self._mixed = None
        if config.graph_max_batch and isinstance(attention[0], GraphAttention):
            assert isinstance(device, GraphDevice)
            self._graphs = self._make_graphs(CaptureBudget(device, may_capture, agree))
            self._mixed = self._make_mixed(CaptureBudget(device, may_capture, agree))

    def launch(self, plan: StepPlan) -> Handle:
        """Start a step and return at once; steps run in the order in which they are launched."""
        self._book.open(plan.openings)
        if self._graphs is None or not plan.is_decode or len(plan.rows) > self.config.graph_max_batch:
            wanted = self._book.look_up(plan.rows)
            work = self._run_eagerly if self._mixed is None else self._replay_mixed
            pending = self._submit(plan, partial(work, plan, wanted))
            return Handle(plan, pending, None, wanted, self._grammars.verdict)
        order = self._order_rows(plan)
        rows = [plan.rows[index] for index in order.rows]
        wanted = self._book.look_up(rows)
        pending = self._submit(plan, partial(self._replay, plan, rows, wanted))
        return Handle(plan, pending, order.places, wanted, self._grammars.verdict)

    def close(self) -> None:
        """Finish what was launched."""
        self._at_close()
        self._device.close()
        self._graphs = self._mixed = None  # they hold this engine: what is frozen is in no garbage collection

    def prepare(self) -> bool:
        """See `Engine.prepare`: captures a graph, or waits a moment for what keeps it from that."""
        if self._graphs is not None and not self._agree(self._may_capture()):
            time.sleep(CAPTURE_WAIT)
            return True
        for graphs in (self._mixed, self._graphs):
            if graphs is not None and graphs.has_missing():
                self._device.submit(graphs.capture_next).wait()
                return True
        return False

    def _submit(self, plan: StepPlan, work: Work) -> Pending:
        return self._device.submit(work if self.tracer is None else self.tracer.watch(plan.step, work))

    def _run_eagerly(self, plan: StepPlan, wanted: Wanted | None) -> Tensor | None:
        state = self._state
        self._open(plan)
        places = state, self._ops, self._attention, self._device.upload
        batch, slots, positions = stage.make_batch(plan, *places, is_padded=self.config.device == "cuda")
        if self.tracer is not None:
            self.tracer.forward(plan.step)
        extras: list[Tensor] = []
        if wanted is not None and wanted.needs_states:
            logits, extras = self._look(batch, len(slots), wanted)
        else:
            logits = self._model.forward(batch, state.kv)
        sampled = stage.Sampled.of(plan.rows)
        if not sampled.slots:
            return torch.cat(extras) if extras else None
        if self.config.debug_checks and not torch.isfinite(logits).all():
            raise RuntimeError(f"step {plan.step}: logits are not finite")
        if self.tracer is not None:
            self.tracer.enter("sample", plan.step)
        output = self._draw(logits, slots, positions, sampled, wanted)
        return torch.cat((output, *extras)) if extras else output

    def _look(self, batch: ForwardBatch, num_sampled: int, wanted: Wanted) -> tuple[Tensor, list[Tensor]]:
        """The logits [sampled, vocab] of a step; in int32, records of prompts' tokens, and embeddings that end."""
        model, top, extras = self._model, wanted.scored_top, []
        at, tokens = (self._device.upload(its) for its in wanted.targets())
        assert batch.logits_indices is not None
        indices = batch.logits_indices, at, self._device.upload(wanted.pooled_places())
        hidden = model.hidden(replace(batch, logits_indices=torch.cat(indices)), self._state.kv).value
        sampled, scored, pooled = hidden.split_with_sizes([num_sampled, len(at), len(indices[2])])
        for start in range(0, len(tokens), ROWS_AT_ONCE):
            logits = model.logits(Hidden(scored[start:][:ROWS_AT_ONCE]))
            extras.append(logprob_records(logits, tokens[start:][:ROWS_AT_ONCE].long(), top).flatten())
        if wanted.pooled:
            states = model.final_states(Hidden(pooled)).split_with_sizes([part.length for part in wanted.pooled])
            embeddings = [self._pools.add(part, its) for part, its in zip(wanted.pooled, states, strict=True)]
            extras += [embedding.view(torch.int32) for embedding in embeddings if embedding is not None]
        return model.logits(Hidden(sampled)), extras

    def _draw(
        self, logits: Tensor, slots: Tensor, positions: Tensor, sampled: stage.Sampled, wanted: Wanted | None
    ) -> Tensor:
        """Ids [sampled]; behind them, in int32, the records of those whose logprobs are wanted."""
        table, grammars, count = self._table, self._grammars, len(sampled.slots)
        places = raw = None
        if wanted is not None and wanted.drawn:
            places = self._device.upload(array("i", [its.place for its in wanted.drawn])).long()
            raw = logits.index_select(0, places)  # what follows changes the logits
        is_adjusted = self._needs_adjusting(sampled.slots, sampled.positions)
        if is_adjusted:
            logits = logits.float()
            table.adjust(logits, sampled.slots, sampled.positions)
        is_dead = grammars.mask(logits, sampled.slots) if grammars.has_any(sampled.slots) else None
        is_filtered = table.needs_filters(sampled.slots)
        ids = self._sampler.draw(logits, slots, positions, self._state.last_tokens, is_filtered=is_filtered)
        if is_adjusted:
            table.advance(ids, sampled.slots)
        shown = ids[:count]
        if is_dead is not None:
            shown = torch.where(is_dead, NO_ID, ids)[:count]
            grammars.advance(shown, sampled.slots)
        if wanted is None or places is None or raw is None:
            return shown
        records = logprob_records(raw, ids.index_select(0, places), wanted.drawn_top)
        return torch.cat((shown.int(), records.flatten()))

    def _open(self, plan: StepPlan) -> None:
        openings = stage.plan_openings(plan)
        self._table.open(openings)
        self._grammars.open(openings)

    def _needs_adjusting(self, slots: Sequence[int], positions: Sequence[int]) -> bool:
        return self._grammars.has_any(slots) or self._table.needs_adjusting(slots, positions)

    def _order_rows(self, plan: StepPlan) -> DecodeOrder:
        rows = plan.rows
        slots = [row.slot for row in rows]
        if plan.openings or slots != self._order.slots:
            order = sorted(range(len(rows)), key=lambda index: -rows[index].start)
            self._order = DecodeOrder(slots, order, sorted(range(len(rows)), key=order.__getitem__))
        return self._order

    def _replay(self, plan: StepPlan, rows: list[Row], wanted: Wanted | None) -> Tensor | None:
        """Decode; `rows` are the plan's, as a graph takes them."""
        assert self._graphs is not None
        slots = array("i", [row.slot for row in rows])
        starts = array("i", [row.start for row in rows])
        self._open(plan)
        is_apart = wanted is not None or self._needs_adjusting(slots, starts)
        draw = Draw.LOGITS if is_apart else Draw.FILTERED if self._table.needs_filters(slots) else Draw.PLAIN
        graph = self._graphs.get(len(rows), draw)
        if graph is None:
            return self._run_eagerly(replace(plan, rows=tuple(rows), openings=()), wanted)
        updates = self._updates_for(plan, room(graph))
        tokens = array("i", [stage.LAST_SAMPLED if row.token_ids is None else row.token_ids[0] for row in rows])
        if self.tracer is not None:
            self.tracer.forward(plan.step)
        output = self._graphs.replay(graph, (tokens, starts, slots), updates)[: len(rows)]
        if not is_apart:
            return output
        _, positions, on_device = graph.numbers[: 3 * graph.batch].view(3, -1)[:, : len(rows)]
        return self._draw(output, on_device, positions, stage.Sampled.of(rows), wanted)

    def _updates_for(self, plan: StepPlan, room: int) -> array[int]:
        """The plan's page updates for a replay that takes `room`; if they are more, they go ahead of it."""
        updates = stage.page_triples(plan, self._state.page_tables)
        if len(updates) <= 3 * room:
            return updates
        stage.stage_tokens(self._device.upload(array("i")), self._device.upload(updates), self._state, self._ops)
        return array("i")

    def _replay_mixed(self, plan: StepPlan, wanted: Wanted | None) -> Tensor | None:
        assert self._mixed is not None
        self._open(plan)
        columns = stage.StepColumns.of(plan.rows)
        _, slots, positions = columns.draws
        draw = Draw.FILTERED if self._table.needs_filters(slots) else Draw.PLAIN
        has_none = not slots or wanted is not None or self._needs_adjusting(slots, positions)
        has_none |= max(row.length for row in plan.rows) > min(its.longest_row for its in _with_tables(self._attention))
        graph = None if has_none else self._mixed.get(plan.num_tokens, len(slots), draw)
        numbers = None if graph is None else self._lay_out(plan, columns, graph.size)
        if graph is None or numbers is None:
            return self._run_eagerly(replace(plan, openings=()), wanted)
        if self.tracer is not None:
            self.tracer.forward(plan.step)
        return self._mixed.replay(graph, numbers)[: len(slots)]

    def _lay_out(self, plan: StepPlan, columns: stage.StepColumns, size: MixedSize) -> array[int] | None:
        """The numbers of a step, padded to a graph's size; None: its rows do not fit."""
        state, tables, layout = self._state, array("i"), stage.layout_of(plan.rows)
        for attention in _with_tables(self._attention):
            numbers = attention.tables(layout, size.tokens, size.rows, state.spare_slot)
            if numbers is None:
                return None
            tables += numbers
        updates = self._updates_for(plan, size.updates)
        columns.pad(size.tokens, size.rows, state.spare_slot)
        spare_update = array("i", [state.spare_slot, 0, self.config.kind_pages[0]])
        updates += spare_update * (size.updates - len(updates) // 3)
        return columns.joined() + updates + tables

    def _make_mixed(self, budget: CaptureBudget) -> MixedGraphs | None:
        attention, device, state = _with_tables(self._attention), self._device, self._state
        if not attention or not isinstance(device, GraphDevice):
            return None

        def body(numbers: Tensor, size: MixedSize, draw: Draw) -> Tensor:
            lengths = [its.table_length(size.tokens, size.rows) for its in attention]
            parts = 3 * size.tokens, 3 * size.rows, 3 * size.updates, *lengths
            tokens, draws, updates, *tables = torch.split_with_sizes(numbers, parts)
            _, positions, _ = tokens = tokens.view(3, -1)
            ends, slots, lasts = draws.view(3, -1)
            input_ids, kv_slots = stage.stage_tokens(tokens, updates, state, self._ops)
            plans = [
                its.plan_tables(numbers, size.tokens, size.rows, table, state.page_size)
                for its, numbers, table in zip(attention, tables, state.page_tables, strict=True)
            ]
            batch = ForwardBatch(input_ids, positions, kv_slots.unbind(0), ends, plans)
            logits = self._model.forward(batch, state.kv)
            is_filtered = draw is Draw.FILTERED
            return self._sampler.draw(logits, slots, lasts, state.last_tokens, is_filtered=is_filtered)

        def spare_numbers(size: MixedSize) -> array[int]:
            row = Row(-1, state.spare_slot, 0, 1, (0,), is_sampled=True)
            numbers = self._lay_out(StepPlan(-1, (row,)), stage.StepColumns.of((row,)), size)
            assert numbers is not None
            return numbers

        config = self.config
        most_tokens = most_graph_tokens(self._model.spec, config.prefill_budget + config.max_running)
        most = MixedSize(stage.padded_count(most_tokens), config.max_running)
        return MixedGraphs(body, spare_numbers, most, device, budget)

    def _make_graphs(self, budget: CaptureBudget) -> DecodeGraphs:
        assert isinstance(self._device, GraphDevice)
        state, config = self._state, self.config
        backends = [its for its in self._attention if isinstance(its, GraphAttention)]

        def body(columns: Tensor, updates: Tensor, draw: Draw) -> Tensor:
            input_ids, kv_slots = stage.stage_tokens(columns, updates, state, self._ops)
            _, positions, slots = columns
            plans = [
                its.plan_decode(slots, positions, table, state.page_size)
                for its, table in zip(backends, state.page_tables, strict=True)
            ]
            batch = ForwardBatch(input_ids, positions, kv_slots.unbind(0), None, plans)
            logits = self._model.forward(batch, state.kv)
            if draw is Draw.LOGITS:
                return logits
            is_filtered = draw is Draw.FILTERED
            return self._sampler.draw(logits, slots, positions, state.last_tokens, is_filtered=is_filtered)

        return DecodeGraphs(
            body,
            config.graph_max_batch,
            self._device,
            budget,
            spare_slot=state.spare_slot,
            spare_page=config.kind_pages[0],
        )


def _with_tables(attention: Sequence[AttentionBackend]) -> list[TableAttention]:
    return [its for its in attention if isinstance(its, TableAttention)]
