"""Drives a model directly: pages, page table and batches without an engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenmill.attention.base import AttentionBackend, KVCache, RowLayout
from tokenmill.layers.batch import ForwardBatch
from tokenmill.models.base import CausalLM
from tokenmill.ops.reference import kv_slots_of

InputRow = tuple[int, int, Sequence[int]]  # slot, start, token ids


class Harness:
    """A model with a K/V pool whose pages lie scattered; what was never written holds NaN. On the default device."""

    def __init__(
        self,
        model: CausalLM,
        backends: Sequence[AttentionBackend],
        *,
        dtype: torch.dtype = torch.float32,
        slots: int = 4,
        max_len: int = 256,
        page_size: int = 4,
    ) -> None:
        spec, pages = model.spec, -(-max_len // page_size)
        shape = (slots * pages * page_size, model.num_kv_heads, spec.head_dim)
        self.kv = [
            KVCache(*(torch.full((len(kind.layers), *shape), float("nan"), dtype=dtype) for _ in range(2)), page_size)
            for kind in spec.kv_kinds
        ]
        scattered = torch.randperm(slots * pages, generator=torch.Generator().manual_seed(1), device="cpu")
        self.page_table = scattered.view(slots, pages).to(self.kv[0].keys.device)
        self._model, self._backends, self._page_size = model, backends, page_size

    def logits(self, rows: Sequence[InputRow], *, of_all_tokens: bool = False) -> Tensor:
        """Compute one step; logits [rows, vocab] float32 of each row's last token, or [tokens, vocab]."""
        lengths = tuple(len(ids) for _, _, ids in rows)
        starts = tuple(start for _, start, _ in rows)
        layout = RowLayout(tuple(slot for slot, _, _ in rows), starts, lengths)
        positions = [start + i for start, length in zip(starts, lengths, strict=True) for i in range(length)]
        slots = torch.tensor([slot for slot, length in zip(layout.slots, lengths, strict=True) for _ in range(length)])
        ends = torch.tensor(lengths).cumsum(0) - 1
        with torch.inference_mode():
            batch = ForwardBatch(
                input_ids=torch.tensor([token for _, _, ids in rows for token in ids]),
                positions=torch.tensor(positions),
                kv_slots=[kv_slots_of(slots, torch.tensor(positions), self.page_table, self._page_size)] * len(self.kv),
                logits_indices=torch.arange(len(positions)) if of_all_tokens else ends,
                attention=[its.plan(layout, self.page_table, self._page_size) for its in self._backends],
            )
            return self._model.forward(batch, self.kv).float()

    def greedy(self, prompt: Sequence[int], count: int, slot: int = 0) -> list[int]:
        """The likeliest `count` ids after a prompt, computed whole and then token by token."""
        ids, new = list(prompt), list(prompt)
        while len(ids) < len(prompt) + count:
            token = int(self.logits([(slot, len(ids) - len(new), new)])[0].argmax())
            new = [token]
            ids.append(token)
        return ids[len(prompt) :]
