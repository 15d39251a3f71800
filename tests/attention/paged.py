"""Rows with a past in scattered pages, and the dense attention that they must equal."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.attention.base import KVCache, RowLayout

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Paged:
    """Random queries, K and V. Every K/V slot that no row owns or sees, also in its own pages, holds NaN."""

    def __init__(
        self,
        rows: list[tuple[int, int]],
        *,
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 16,
        page: int = 4,
        dtype: torch.dtype = torch.float32,
        window: int = 0,
        cap: float = 0.0,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        slots, pages = len(rows) + 2, max(-(-(start + length) // page) for start, length in rows)
        order = torch.randperm(slots, generator=generator).tolist()[: len(rows)]
        self.rows, self.dtype, self.page, self.window, self.cap = rows, dtype, page, window, cap
        self.layout = RowLayout(tuple(order), tuple(row[0] for row in rows), tuple(row[1] for row in rows))
        table = torch.randperm(slots * pages, generator=generator).view(slots, pages)
        tokens = sum(self.layout.lengths)
        self.query = torch.randn(tokens, heads, dim, generator=generator).to(DEVICE, dtype)
        shape = (2, slots * pages * page, kv_heads, dim)
        keys, values = (torch.full(shape, float("nan")) for _ in range(2))
        self.contexts: list[tuple[Tensor, Tensor]] = []
        for slot, (start, length) in zip(order, rows, strict=True):
            positions = torch.arange(start + length)
            places = table[slot, positions // page] * page + positions % page
            keys[1, places], values[1, places] = context = torch.randn(
                2, start + length, kv_heads, dim, generator=generator
            )
            unseen = places[: max(0, start + 1 - window) if window else 0]
            keys[1, unseen] = values[1, unseen] = float("nan")
            self.contexts.append(tuple(context.to(dtype)))
        self.kv = KVCache(keys.to(DEVICE, dtype), values.to(DEVICE, dtype), page)
        self.table = table.to(DEVICE, torch.int32)
        self.scale = dim**-0.5

    @property
    def slots(self) -> Tensor:
        return torch.tensor(self.layout.slots, dtype=torch.int32, device=DEVICE)

    @property
    def last_positions(self) -> Tensor:
        ends = [start + length - 1 for start, length in self.rows]
        return torch.tensor(ends, dtype=torch.int32, device=DEVICE)

    def expected(self) -> Tensor:
        """One row at a time, in float64."""
        results, first = [], 0
        query = self.query.cpu().double()
        share = query.shape[1] // self.kv.keys.shape[2]
        for (keys, values), (start, length) in zip(self.contexts, self.rows, strict=True):
            keys, values = (x.double().repeat_interleave(share, 1) for x in (keys, values))
            scores = torch.einsum("qhd,nhd->hqn", query[first : first + length], keys) * self.scale
            if self.cap:
                scores = (scores / self.cap).tanh() * self.cap
            everything = torch.ones(length, start + length, dtype=torch.bool)
            scores.masked_fill_(everything.triu(start + 1), float("-inf"))
            if self.window:
                scores.masked_fill_(everything.tril(start - self.window), float("-inf"))
            results.append(torch.einsum("hqn,nhd->qhd", scores.softmax(2), values))
            first += length
        return torch.cat(results)

    def check(self, result: Tensor) -> None:
        tolerance = TOLERANCE[self.dtype]
        assert result.dtype == self.dtype
        torch.testing.assert_close(result.cpu().double(), self.expected(), atol=tolerance, rtol=tolerance)
