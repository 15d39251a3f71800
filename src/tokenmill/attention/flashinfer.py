"""Paged attention by FlashInfer (Ye et al., arXiv:2501.01005), which plans on the host and runs on the device too."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, cycle
from typing import Any

import torch
from torch import Tensor

from tokenmill.attention.base import KVCache, RowLayout
from tokenmill.errors import ConfigError

WORKSPACE_BYTES = 128 << 20  # what FlashInfer recommends
TENSOR_CORES_FROM = 4  # query heads for a K/V head; its other decode kernels take groups of 1, 2, 3, 4 and 8
DECODE, PREFILL = 1, 2  # lengths of rows that are computed by one and the other kernel


class FlashInferAttention:
    """`attention.base.AttentionBackend` by FlashInfer: steps of decode rows only by its decode kernel, others by its
    kernel for prefill.

    Args:
        scale: multiplies the scores.
        window: positions that a token attends to, its own the last; 0: all.
        cap: bound of the scores, cap * tanh(score / cap); 0: none.
        num_heads, num_kv_heads: of this rank.
        dtype: of queries, keys and values; bfloat16 or float16.
        device: a CUDA device.
        lengths: kernels are compiled, unless FlashInfer has them in its cache, for steps of such rows.

    Raises:
        ConfigError: FlashInfer cannot be loaded, or cannot compile its kernels.
    """

    name = "flashinfer"

    def __init__(
        self,
        *,
        scale: float,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        window: int = 0,
        cap: float = 0.0,
        lengths: Sequence[int] = (DECODE, PREFILL),
    ) -> None:
        self._heads, self._window = (num_heads, num_kv_heads, head_dim), window
        self._options: dict[str, Any] = {"sm_scale": scale, "q_data_type": dtype}
        if window:
            self._options["window_left"] = window - 1  # positions before a token's own
        if cap:
            self._options["logits_soft_cap"] = cap
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)  # steps use it one after the other
        table = torch.zeros((1, max(lengths)), dtype=torch.int32, device=device)
        try:
            from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

            # A plan crosses from a wrapper's pinned memory, which its next plan overwrites. Of two wrappers that take
            # turns, the other's plan belongs to the step before; and only that step may still be in flight.
            tensor_cores = num_heads // num_kv_heads >= TENSOR_CORES_FROM
            self._decode = cycle(
                [BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=tensor_cores) for _ in range(2)]
            )
            self._prefill = cycle([BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD") for _ in range(2)])
            for length in lengths:
                self.plan(RowLayout((0,), (0,), (length,)), table, 1)
        except (ImportError, OSError, RuntimeError) as error:
            raise ConfigError(f"--attention flashinfer cannot load or compile its kernels: {error}") from error

    def plan(self, layout: RowLayout, page_table: Tensor, page_size: int) -> Any:
        """See `AttentionBackend.plan`: the wrapper that has planned the step. Copies, and no wait for them."""
        # Pages before the window may be missing: rows begin with the first page that is seen.
        skipped = [max(0, start + 1 - self._window) // page_size if self._window else 0 for start in layout.starts]
        rows = zip(layout.starts, layout.lengths, skipped, strict=True)
        contexts = [start + length - skip * page_size for start, length, skip in rows]
        numbers = [
            [0, *accumulate(layout.lengths)],
            [0, *accumulate(-(-context // page_size) for context in contexts)],
            [(context - 1) % page_size + 1 for context in contexts],
            list(layout.slots),
            skipped,
        ]
        sizes = [len(part) for part in numbers]
        flat = [number for part in numbers for number in part]
        host = torch.tensor(flat, dtype=torch.int32, pin_memory=page_table.is_cuda)
        tokens, pages, last_page_len, *_ = host.split_with_sizes(sizes)
        _, first_pages, _, slots, skips = host.to(page_table.device, non_blocking=True).split_with_sizes(sizes)
        indices = pages_in_order(slots, first_pages, skips, page_table, numbers[1][-1])
        places = pages, indices, last_page_len, *self._heads, page_size
        if max(layout.lengths) == DECODE:
            wrapper = next(self._decode)
            wrapper.plan(*places, **self._options)
        else:
            wrapper = next(self._prefill)
            wrapper.plan(tokens, *places, causal=True, **self._options)
        return wrapper

    def run(self, query: Tensor, kv: KVCache, layer: int, metadata: Any) -> Tensor:
        """See `AttentionBackend.run`."""
        paged = tuple(pool[layer].view(-1, kv.page_size, *pool.shape[2:]) for pool in (kv.keys, kv.values))
        out = query.new_empty(query.shape)  # [tokens, heads, head_dim]
        # Without programmatic dependent launch: FlashInfer does not keep the rules that the kernels around it need.
        metadata.run(query, paged, out=out, enable_pdl=False)
        return out


def pages_in_order(slots: Tensor, first_pages: Tensor, skips: Tensor, page_table: Tensor, total: int) -> Tensor:
    """The rows' pages end to end, [total] int32, without a wait for the device.

    Args:
        slots: [rows] int32.
        first_pages: [rows + 1] int32; row i's pages are first_pages[i] .. first_pages[i + 1] - 1 of the result.
        skips: [rows] int32, pages at the start of each row that are left out.
        page_table: [slots, pages].
        total: the last of `first_pages`.
    """
    rows = torch.repeat_interleave(first_pages.diff(), output_size=total)  # [total]
    columns = torch.arange(total, device=rows.device) - first_pages[rows] + skips[rows]
    return page_table[slots[rows], columns].int()
