"""The operations of a model as calls that can be timed, over buffers that no cache holds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tokenmill.attention.base import AttentionBackend, FusedAttention, GraphAttention, KVCache, RowLayout
from tokenmill.config import ResolvedConfig
from tokenmill.engine.device import COPY_BYTES
from tokenmill.ops.api import Experts, HeadNorms, Hidden, Norm, Ops, Rotation
from tokenmill.sampling.adjust import Upload
from tokenmill.sampling.batch import Opening, SamplingTable
from tokenmill.sampling.select import make_sampler
from tokenmill.spec import ModelSpec
from tokenmill.types import SamplingParams

ROTATED_BYTES = {"cpu": 2**26, "cuda": 2**28}  # several times the last cache
MOST_COPIES = 64
RAGGED = (64, 2048)  # tokens of context
DRAWS = (
    ("sampling", SamplingParams(temperature=0.6, seed=0), False),
    ("sampling, top_k + top_p", SamplingParams(temperature=0.6, top_k=50, top_p=0.9, seed=0), True),
)

Call = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """One operation at one size. Each of `calls` does it once, on buffers of its own.

    `num_bytes` and `num_flops` are the least that a call must move and compute. `is_captured` tells that the engine
    calls it in a CUDA graph.
    """

    name: str
    rows: int | None
    calls: Sequence[Call]
    num_bytes: int
    num_flops: int = 0
    is_captured: bool = True


class Operations:
    """Builds cases for a model: `ops` and `attention` are what an engine would use."""

    def __init__(
        self, spec: ModelSpec, ops: Ops, attention: AttentionBackend, config: ResolvedConfig, upload: Upload
    ) -> None:
        self._spec, self._ops, self._attention, self._upload = spec, ops, attention, upload
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self._device, self._page_size = torch.device(config.device), config.page_size

    def cases(self, rows: Sequence[int], context: int, prompt: int) -> Iterator[Case]:
        """A copy of memory; decode steps of so many rows; attention of a prompt, alone and on as long a prefix.

        Memory is taken when a case is made, and free once it is forgotten.
        """
        yield self._copy()
        for count in rows:
            yield from self._products(count)
            yield from self._experts(count)
            yield from self._between(count)
            yield from self._draws(count)
            yield from self._decode("", [context] * count)
            if count > 1:
                draw = random.Random(0)
                lengths = sorted((draw.randint(*RAGGED) for _ in range(count)), reverse=True)
                yield from self._decode(", ragged", lengths)
        yield from self._experts(prompt)
        yield self._prefill("prefill attention", prompt, 0)
        yield self._prefill("prefill on a prefix", prompt, prompt)

    def _copy(self) -> Case:
        source, target = torch.ones(2, COPY_BYTES[self._device.type], dtype=torch.uint8, device=self._device)
        return Case("copy", None, [partial(target.copy_, source)], 2 * source.nbytes, is_captured=False)

    def _products(self, rows: int) -> Iterator[Case]:
        spec, ops, hidden = self._spec, self._ops, self._spec.hidden_size
        heads, inner = spec.num_heads * spec.head_dim, spec.intermediate_size
        qkv = heads + 2 * spec.num_kv_heads * spec.head_dim
        x, residual = self._random(rows, hidden), self._random(rows, hidden)
        norm = Norm(self._random(hidden), spec.norm_eps)
        from_heads, from_inner = self._random(rows, heads), self._random(rows, inner)
        normed, gated = (partial(call, Hidden(x), norm=norm) for call in (ops.normed_linear, ops.gated_linear))

        def added(x: Tensor, weight: Tensor) -> Tensor:
            result = Hidden(residual)
            ops.add_linear(result, x, weight)
            return result.value

        dense = (
            ("gate and up product", gated, 2 * inner, hidden, inner),
            ("down product", partial(added, from_inner), hidden, inner, 2 * hidden),
        )
        for name, call, outputs, inputs, moved in (
            ("qkv product", normed, qkv, hidden, qkv),
            ("output product", partial(added, from_heads), hidden, heads, 2 * hidden),
            *(dense if spec.experts is None or spec.experts.dense_layers else ()),
            ("logits product", normed, spec.vocab_size, hidden, spec.vocab_size),
        ):
            num_bytes = (outputs * inputs + rows * (inputs + moved)) * self._dtype.itemsize
            weights = [self._random(outputs, inputs) for _ in range(self._copies(num_bytes))]
            calls = [partial(call, weight=weight) for weight in weights]
            yield Case(name, rows, calls, num_bytes, 2 * rows * outputs * inputs)

    def _experts(self, rows: int) -> Iterator[Case]:
        """A layer's experts, with the choice of them; each is as likely as any other."""
        spec, hidden = self._spec.experts, self._spec.hidden_size
        if spec is None:
            return
        x, residual, router = (self._random(lines, hidden) for lines in (rows, rows, spec.num_experts))
        used = spec.num_experts * (1 - (1 - spec.num_chosen / spec.num_experts) ** rows)
        num_bytes = int(3 * used * spec.size * hidden + 3 * x.numel()) * self._dtype.itemsize

        def added(experts: Experts) -> Tensor:
            result = Hidden(residual)
            self._ops.add_experts(result, x, router, experts)
            return result.value

        counters = torch.zeros(spec.num_experts + 1, dtype=torch.int32, device=self._device)
        each = [
            Experts(
                self._random(spec.num_experts, 2 * spec.size, hidden),
                self._random(spec.num_experts, hidden, spec.size),
                counters,
                spec.num_chosen,
                spec.is_renormalised,
            )
            for _ in range(self._copies(num_bytes))
        ]
        num_flops = 6 * rows * spec.num_chosen * spec.size * hidden
        yield Case("experts", rows, [partial(added, experts) for experts in each], num_bytes, num_flops)

    def _between(self, rows: int) -> Iterator[Case]:
        """What is neither product nor attention."""
        spec = self._spec
        x = self._random(rows, spec.hidden_size)
        norm = Norm(self._random(spec.hidden_size), spec.norm_eps)
        yield Case("norm", rows, [partial(self._ops.rms_norm, x, norm)] * MOST_COPIES, 2 * x.nbytes)
        qkv, rotation, norms = self._qkv(rows)
        kv, page_table = self._pool(1, [rows])
        places = torch.arange(rows, dtype=page_table.dtype, device=self._device)
        call = partial(self._ops.prepare_qkv, qkv, rotation, norms, kv.keys[0], kv.values[0], places)
        yield Case("rope + K/V store", rows, [call] * MOST_COPIES, 2 * qkv.nbytes)

    def _draws(self, rows: int) -> Iterator[Case]:
        table = SamplingTable(rows, self._spec.vocab_size, self._upload)
        sampler = make_sampler(table, self._spec, rows, self._ops)
        slots = torch.arange(rows, dtype=torch.int32, device=self._device)
        last_tokens = torch.zeros(rows, dtype=torch.int64, device=self._device)
        num_bytes = rows * self._spec.vocab_size * self._dtype.itemsize
        logits = [self._random(rows, self._spec.vocab_size) for _ in range(self._copies(num_bytes))]
        for name, params, is_filtered in DRAWS:
            table.open([Opening(slot, params, 1, ()) for slot in range(rows)])
            calls = [partial(sampler.draw, its, slots, slots, last_tokens, is_filtered=is_filtered) for its in logits]
            yield Case(name, rows, calls, num_bytes)

    def _decode(self, suffix: str, lengths: Sequence[int]) -> Iterator[Case]:
        """Attention of one query a row, and with what comes before it in a layer."""
        attention, rows = self._attention, len(lengths)
        kv_bytes = self._kv_bytes(sum(lengths))
        layers = self._copies(kv_bytes)
        kv, page_table = self._pool(layers, lengths)
        positions = [length - 1 for length in lengths]
        slots = torch.arange(rows, dtype=torch.int32, device=self._device)
        is_captured = isinstance(attention, GraphAttention)
        if isinstance(attention, GraphAttention):
            at = torch.tensor(positions, dtype=torch.int32, device=self._device)
            metadata = attention.plan_decode(slots, at, page_table, self._page_size)
        else:
            layout = RowLayout(tuple(range(rows)), tuple(positions), (1,) * rows)
            metadata = attention.plan(layout, page_table, self._page_size)
        query = self._random(rows, self._spec.num_heads, self._spec.head_dim)
        calls = [partial(attention.run, query, kv, layer, metadata) for layer in range(layers)]
        flops = 4 * query[0].numel() * sum(lengths)
        yield Case(f"decode attention{suffix}", rows, calls, kv_bytes + 2 * query.nbytes, flops, is_captured)
        if isinstance(attention, FusedAttention) and attention.prepares(metadata):
            qkv, rotation, norms = self._qkv(rows)
            calls = [
                partial(attention.prepare_and_run, qkv, rotation, norms, kv, layer, metadata) for layer in range(layers)
            ]
            num_bytes = kv_bytes + qkv.nbytes + query.nbytes
            yield Case(f"rope + decode attention{suffix}", rows, calls, num_bytes, flops, is_captured)

    def _prefill(self, name: str, length: int, prefix: int) -> Case:
        """Causal attention of one row of `length` tokens after `prefix` tokens, as steps of prompts do it."""
        kv, page_table = self._pool(2, [length + prefix])
        metadata = self._attention.plan(RowLayout((0,), (prefix,), (length,)), page_table, self._page_size)
        query = self._random(length, self._spec.num_heads, self._spec.head_dim)
        calls = [partial(self._attention.run, query, kv, layer, metadata) for layer in range(2)]
        flops = 4 * query[0].numel() * (length * prefix + length * (length + 1) // 2)
        num_bytes = self._kv_bytes(length + prefix) + 2 * query.nbytes
        return Case(name, length, calls, num_bytes, flops, is_captured=False)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self._dtype, device=self._device)

    def _copies(self, num_bytes: int) -> int:
        """How many buffers are used in turn."""
        return min(MOST_COPIES, max(2, ROTATED_BYTES[self._device.type] // num_bytes))

    def _qkv(self, rows: int) -> tuple[Tensor, Rotation, HeadNorms | None]:
        spec = self._spec
        qkv = self._random(rows, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        angles = torch.randn(rows, 1, spec.rope.rotary_dim or spec.head_dim, device=self._device)
        weight = self._random(spec.head_dim)
        norms = HeadNorms(weight, weight, spec.norm_eps) if spec.qk_norm else None
        return qkv, Rotation(angles.cos(), angles.sin()), norms

    def _kv_bytes(self, tokens: int) -> int:
        return 2 * tokens * self._spec.num_kv_heads * self._spec.head_dim * self._dtype.itemsize

    def _pool(self, layers: int, lengths: Sequence[int]) -> tuple[KVCache, Tensor]:
        """K/V of rows of these lengths in scattered pages, and their page table [rows, pages]."""
        width = -(-max(lengths) // self._page_size)
        pages = torch.randperm(len(lengths) * width, device=self._device).view(len(lengths), width)
        shape = (layers, pages.numel() * self._page_size, self._spec.num_kv_heads, self._spec.head_dim)
        kv = KVCache(self._random(*shape), self._random(*shape), self._page_size)
        return kv, pages if self._device.type == "cpu" else pages.to(torch.int32)
