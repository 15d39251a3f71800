"""Logits in, ids out: bias, temperature, top-k, top-p, min-p, draw.

One uniform number decides a draw. It is a hash of (seed, position), so what shares the batch does not matter. The
draw inverts the cumulative distribution, in order of probability where top_k or top_p need that order, else of ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.sampling.batch import TOP_K_LIMIT, SamplingTable

GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """A number in [0, 1) from each (seed, position): SplitMix64's output function (Steele et al. 2014).

    Args:
        seed: [rows] int64.
        position: [rows] int64.

    Returns:
        [rows] float64.
    """
    state = _mix(seed * MIX_1 + GOLDEN) + (position + 1) * GOLDEN
    return _shift(_mix(state), 11).to(torch.float64) * 2.0**-53


def _shift(value: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _mix(value: Tensor) -> Tensor:
    value = (value ^ _shift(value, 30)) * MIX_1
    value = (value ^ _shift(value, 27)) * MIX_2
    return value ^ _shift(value, 31)


def sample(logits: Tensor, table: SamplingTable, slots: list[int], positions: list[int]) -> Tensor:
    """Draw one token a row. `logits` is written to.

    Args:
        logits: [sampled, vocab] float32.
        table: the parameters of the slots.
        slots: the slot of each row.
        positions: the position of the token that each row draws.

    Returns:
        [sampled] int64.
    """
    table.adjust(logits, slots, positions)
    ids = logits.argmax(dim=-1)
    drawn = [index for index, slot in enumerate(slots) if not table.is_greedy(slot)]
    for is_filtered, draw in ((False, _draw_plain), (True, _draw_ranked)):
        rows = [index for index in drawn if table.is_filtered(slots[index]) is is_filtered]
        if rows:
            at = torch.tensor(rows, device=logits.device)
            slot = torch.tensor([slots[index] for index in rows], device=logits.device)
            position = torch.tensor([positions[index] for index in rows], device=logits.device)
            scaled = logits[at] / table.temperature[slot].unsqueeze(1)
            ids[at] = draw(scaled, table, slot, uniform(table.seed[slot], position))
    return ids


def _draw_plain(scaled: Tensor, table: SamplingTable, slot: Tensor, noise: Tensor) -> Tensor:
    """Draw with min_p only. `scaled` is [rows, vocab]."""
    probabilities = scaled.softmax(dim=-1)
    least = table.min_p[slot].unsqueeze(1) * probabilities.amax(dim=-1, keepdim=True)
    probabilities.masked_fill_(probabilities < least, 0.0)
    return _invert(probabilities, noise)


def _draw_ranked(scaled: Tensor, table: SamplingTable, slot: Tensor, noise: Tensor) -> Tensor:
    """Draw with top_k, top_p and min_p. `scaled` is [rows, vocab]; rows that need more than the likeliest tokens
    are sorted whole.
    """
    vocab = scaled.shape[1]
    top_k, top_p = table.top_k[slot], table.top_p[slot]
    limit = min(TOP_K_LIMIT, vocab)
    log_total = scaled.logsumexp(dim=-1, keepdim=True)
    values, order = scaled.topk(limit, dim=-1)
    probabilities = (values - log_total).exp()
    enough = (probabilities.sum(dim=-1) >= top_p) | ((top_k > 0) & (top_k <= limit))
    ids = _draw_in_order(probabilities, order, table, slot, noise)
    rest = (~enough).nonzero().flatten()
    if limit < vocab and len(rest):
        values, order = scaled[rest].sort(dim=-1, descending=True)
        probabilities = (values - log_total[rest]).exp()
        ids[rest] = _draw_in_order(probabilities, order, table, slot[rest], noise[rest])
    return ids


def _draw_in_order(probabilities: Tensor, order: Tensor, table: SamplingTable, slot: Tensor, noise: Tensor) -> Tensor:
    """Draw from the likeliest tokens. `probabilities` is [rows, ranks], likeliest first, `order` their ids.

    top_p is a share of what top_k leaves, as in Hugging Face and vLLM.
    """
    rank = torch.arange(probabilities.shape[1], device=probabilities.device)
    top_k = table.top_k[slot].unsqueeze(1)
    probabilities = probabilities.masked_fill((top_k > 0) & (rank >= top_k), 0.0)
    is_cut = (top_k.squeeze(1) > 0).unsqueeze(1)
    total = torch.where(is_cut, probabilities.sum(dim=-1, keepdim=True), 1.0)
    before = probabilities.cumsum(dim=-1) - probabilities
    is_out = before >= table.top_p[slot].unsqueeze(1) * total
    is_out |= probabilities < table.min_p[slot].unsqueeze(1) * probabilities[:, :1]
    is_out[:, 0] = False
    rank_drawn = _invert(probabilities.masked_fill(is_out, 0.0), noise)
    return order.gather(1, rank_drawn.unsqueeze(1)).squeeze(1)


def _invert(weights: Tensor, noise: Tensor) -> Tensor:
    """The first index whose cumulative weight is over noise x total. `weights` is [rows, n], not all zero a row."""
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    target = noise.unsqueeze(1) * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    last = weights.shape[1] - 1 - (weights.flip(-1) > 0).to(torch.uint8).argmax(dim=-1)
    return torch.minimum(index, last)
