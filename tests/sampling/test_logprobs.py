from __future__ import annotations

import pytest
import torch

from tokenmill.sampling.logprobs import LEAST, ROWS_AT_ONCE, logprob_records, record_width

VOCAB = 300


def parts(records: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Own logprobs and ranks [rows], ids and logprobs of the likeliest [rows, top]."""
    assert records.dtype is torch.int32
    assert records.shape[1] == record_width(top)
    numbers = records.view(torch.float32)
    return numbers[:, 0], records[:, 1], records[:, 2::2], numbers[:, 3::2]


@pytest.mark.parametrize("top", [0, 1, 20])
@pytest.mark.parametrize("rows", [1, ROWS_AT_ONCE, 2 * ROWS_AT_ONCE + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_records_are_the_softmax_of_the_logits_in_float32(top, rows, dtype):
    generator = torch.Generator().manual_seed(top)
    logits = (torch.randn(rows, VOCAB, generator=generator) * 4).to(dtype)
    tokens = torch.randint(VOCAB, (rows,), generator=generator)
    own, rank, ids, likeliest = parts(logprob_records(logits, tokens, top), top)
    truth = logits.double().log_softmax(-1)
    expected = truth.gather(1, tokens.unsqueeze(1))
    torch.testing.assert_close(own.double(), expected[:, 0], atol=1e-5, rtol=0)
    assert torch.equal(rank, 1 + (truth > expected).sum(-1, dtype=torch.int32))
    torch.testing.assert_close(likeliest.double(), truth.sort(descending=True).values[:, :top], atol=1e-5, rtol=0)
    torch.testing.assert_close(likeliest.double(), truth.gather(1, ids.long()), atol=1e-5, rtol=0)


def test_numbers_are_finite_whatever_the_logits_are():
    logits = torch.zeros(4, VOCAB)
    logits[0, 5] = float("-inf")
    logits[1] = float("nan")
    logits[2] = float("-inf")
    logits[3, 5] = float("inf")
    own, _, _, likeliest = parts(logprob_records(logits, torch.full((4,), 5), 2), 2)
    assert own[0] == LEAST
    assert torch.isfinite(own).all()
    assert torch.isfinite(likeliest).all()
    assert (likeliest[0] > LEAST).all()
