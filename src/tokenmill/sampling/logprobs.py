"""What the model finds likely, before anything changes its logits; as numbers that travel with the ids drawn."""

from __future__ import annotations

import torch
from torch import Tensor

LEAST = -9999.0  # OpenAI's number for what cannot be; JSON knows no infinity
ROWS_AT_ONCE = 128  # whose logits are in memory as float32, which large vocabularies fill


def record_width(top: int) -> int:
    """Numbers for one place: a token's logprob and rank, then id and logprob of each of the likeliest."""
    return 2 + 2 * top


def logprob_records(logits: Tensor, tokens: Tensor, top: int) -> Tensor:
    """Log-probabilities of given tokens, and of the likeliest ones.

    Args:
        logits: [rows, vocab].
        tokens: [rows] int64.
        top: how many of the likeliest, at most the vocabulary.

    Returns:
        [rows, record_width(top)] int32; logprobs are the bits of float32.
    """
    if len(logits) > ROWS_AT_ONCE:
        parts = [slice(at, at + ROWS_AT_ONCE) for at in range(0, len(logits), ROWS_AT_ONCE)]
        return torch.cat([logprob_records(logits[part], tokens[part], top) for part in parts])
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(1, tokens.unsqueeze(1))  # [rows, 1]
    rank = (logprobs > own).sum(-1, keepdim=True, dtype=torch.int32) + 1
    values, ids = logprobs.topk(top)
    pairs = torch.stack((ids.int(), _bits(values)), -1).flatten(1)
    return torch.cat((_bits(own), rank, pairs), 1)


def _bits(logprobs: Tensor) -> Tensor:
    return logprobs.nan_to_num(nan=LEAST).clamp_(min=LEAST).view(torch.int32)
