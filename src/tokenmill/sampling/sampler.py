"""Adjusted logits in, ids out: temperature, top-k, top-p, min-p, draw.

A draw is a race (the Gumbel-max trick): each id's time is an exponential number over its probability, and the least
time wins. The number is a hash of (seed, position, id), so what shares the batch does not matter, and an error in the
last bits of the logits changes a draw only where two ids arrive almost together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.sampling.batch import TOP_K_LIMIT, SamplingTable

GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
ID_FACTOR = -1640531535  # 0x9E3779B1 as int32
MURMUR_1 = -2048144789  # 0x85EBCA6B
MURMUR_2 = -1028477387  # 0xC2B2AE35


def exponential(seed: Tensor, position: Tensor, ids: Tensor) -> Tensor:
    """Exponentially distributed numbers, one for each (seed, position, id).

    A row's key is SplitMix64's output function (Steele et al. 2014) of seed and position; an id's number comes from
    MurmurHash3's 32-bit finalizer (Appleby) over id and key.

    Args:
        seed: [rows] int64.
        position: [rows] int64.
        ids: [ids], or [rows, ids], int64.

    Returns:
        [rows, ids] float32, over 0.
    """
    key = _mix64(_mix64(seed * MIX_1 + GOLDEN) + (position + 1) * GOLDEN).unsqueeze(1).view(torch.int32)  # [rows, 2]
    state = ids.to(torch.int32) * ID_FACTOR + key[:, :1]
    state = _mix32(_mix32(state) ^ key[:, 1:])
    part = ((state & 0x7FFFFFFF).to(torch.float32) + 0.5) * 2.0**-31
    # Rounding makes 1 of the largest: an infinite time, with which even the only id left would not win.
    return -torch.log1p(-part.clamp_(max=1 - 2.0**-24))


def _mix64(value: Tensor) -> Tensor:
    value = (value ^ ((value >> 30) & (2**34 - 1))) * MIX_1
    value = (value ^ ((value >> 27) & (2**37 - 1))) * MIX_2
    return value ^ ((value >> 31) & (2**33 - 1))


def _mix32(value: Tensor) -> Tensor:
    value = (value ^ ((value >> 16) & 0xFFFF)) * MURMUR_1
    value = (value ^ ((value >> 13) & 0x7FFFF)) * MURMUR_2
    return value ^ ((value >> 16) & 0xFFFF)


def sample(logits: Tensor, table: SamplingTable, slots: list[int], positions: list[int]) -> Tensor:
    """Draw one token a row, from logits that are adjusted already (`SamplingTable.adjust`).

    Args:
        logits: [sampled, vocab] float32.
        table: the parameters of the slots.
        slots: the slot of each row.
        positions: the position of the token that each row draws.

    Returns:
        [sampled] int64.
    """
    ids = logits.argmax(dim=-1)
    drawn = [index for index, slot in enumerate(slots) if not table.is_greedy_slot(slot)]
    for is_filtered, draw in ((False, _draw_plain), (True, _draw_ranked)):
        rows = [index for index in drawn if table.is_filtered_slot(slots[index]) is is_filtered]
        if rows:
            at = torch.tensor(rows, device=logits.device)
            slot = torch.tensor([slots[index] for index in rows], device=logits.device)
            position = torch.tensor([positions[index] for index in rows], device=logits.device)
            scaled = logits[at] / table.temperature[slot].unsqueeze(1)
            ids[at] = draw(scaled, table, slot, position)
    return ids


def _draw_plain(scaled: Tensor, table: SamplingTable, slot: Tensor, position: Tensor) -> Tensor:
    """Draw with min_p only. `scaled` is [rows, vocab]."""
    least = scaled.amax(dim=-1, keepdim=True) + table.min_p[slot].log().unsqueeze(1)
    ids = torch.arange(scaled.shape[1], device=scaled.device)
    score = scaled - exponential(table.seed[slot], position, ids).log_()
    return score.masked_fill_(scaled < least, float("-inf")).argmax(dim=-1)


def _draw_ranked(scaled: Tensor, table: SamplingTable, slot: Tensor, position: Tensor) -> Tensor:
    """Draw with top_k, top_p and min_p. `scaled` is [rows, vocab].

    Only rows for which the likeliest `TOP_K_LIMIT` tokens are not enough are sorted whole.
    """
    top_k, top_p = table.top_k[slot], table.top_p[slot]
    limit = min(TOP_K_LIMIT, scaled.shape[1])
    log_total = scaled.logsumexp(dim=-1, keepdim=True)
    values, order = scaled.topk(limit, dim=-1)
    probabilities = (values - log_total).exp()
    is_enough = torch.where(top_k > 0, top_k <= limit, probabilities.sum(dim=-1) >= top_p)
    ids = _draw_in_order(probabilities, order, table, slot, position)
    rest = (~is_enough).nonzero().flatten()
    if limit < scaled.shape[1] and len(rest):
        values, order = scaled[rest].sort(dim=-1, descending=True)
        probabilities = (values - log_total[rest]).exp()
        ids[rest] = _draw_in_order(probabilities, order, table, slot[rest], position[rest])
    return ids


def _draw_in_order(
    probabilities: Tensor, order: Tensor, table: SamplingTable, slot: Tensor, position: Tensor
) -> Tensor:
    """Draw from the likeliest tokens. `probabilities` is [rows, ranks], likeliest first, `order` their ids.

    top_p is a share of what top_k leaves, as in Hugging Face and vLLM.
    """
    rank = torch.arange(probabilities.shape[1], device=probabilities.device)
    top_k = table.top_k[slot].unsqueeze(1)
    probabilities = probabilities.masked_fill((top_k > 0) & (rank >= top_k), 0.0)
    total = torch.where(top_k > 0, probabilities.sum(dim=-1, keepdim=True), 1.0)
    before = probabilities.cumsum(dim=-1) - probabilities
    is_out = before >= table.top_p[slot].unsqueeze(1) * total
    is_out |= probabilities < table.min_p[slot].unsqueeze(1) * probabilities[:, :1]
    is_out[:, 0] = False
    speed = probabilities / exponential(table.seed[slot], position, order)
    winner = speed.masked_fill_(is_out, -1.0).argmax(dim=-1, keepdim=True)
    return order.gather(1, winner).squeeze(1)
