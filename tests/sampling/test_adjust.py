"""Biases, forbidden ids and penalties, against plain Python over the tokens so far."""

from __future__ import annotations

import random
from array import array

import pytest
import torch
import transformers

from tokenmill.sampling.adjust import LAST_RESORT
from tokenmill.sampling.batch import Opening, SamplingTable
from tokenmill.types import SamplingParams

VOCAB, SLOTS = 40, 6


def upload(numbers: array) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def expected(logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    """The adjusted logits of one row by their definition."""
    result = []
    for token, logit in enumerate(logits):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            result.append(float("-inf"))
            continue
        bad = [list(ids) for ids in params.bad_words]
        if any([*output, token][-len(ids) :] == ids for ids in bad):
            result.append(LAST_RESORT)
            continue
        logit += params.logit_bias.get(token, 0.0)
        if token in prompt or token in output:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        logit -= params.frequency_penalty * output.count(token) + params.presence_penalty * (token in output)
        result.append(logit)
    return result


def random_params(choice: random.Random) -> SamplingParams:
    options = {
        "repetition_penalty": choice.choice([0.5, 1.3, 2.0]),
        "frequency_penalty": choice.choice([-2.0, 0.7]),
        "presence_penalty": choice.choice([-0.3, 1.9]),
        "logit_bias": {choice.randrange(VOCAB): 3.0},
        "allowed_token_ids": choice.sample(range(VOCAB), 8),
        "bad_words": [choice.choices(range(VOCAB), k=length) for length in (1, 2, 2, 3)],
    }
    return SamplingParams(**{name: options[name] for name in options if choice.random() < 0.5})


@pytest.mark.parametrize("seed", range(20))
def test_logits_are_adjusted_as_by_definition_while_requests_come_and_go(seed):
    choice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    table = SamplingTable(SLOTS, VOCAB, upload)
    requests: dict[int, tuple[SamplingParams, list[int], list[int]]] = {}
    for _ in range(60):
        for slot in choice.sample(range(SLOTS), choice.randrange(3)):
            if slot in requests and choice.random() < 0.5:  # the same request again, as after a retraction
                params, prompt, output = requests[slot]
            else:
                params, prompt, output = random_params(choice), choice.choices(range(VOCAB), k=5), []
            requests[slot] = params, prompt, output
            history = array("i", prompt + output).tobytes() if params.needs_history else b""
            table.open([Opening(slot, params, len(prompt), (), history)])
        slots = choice.sample(sorted(requests), choice.randint(0, len(requests)))
        logits = torch.randn(len(slots), VOCAB, generator=generator) * 3
        adjusted = logits.clone()
        table.adjust(adjusted, slots, [len(requests[slot][1]) for slot in slots])
        for row, before, slot in zip(adjusted, logits, slots, strict=True):
            wanted = torch.tensor(expected(before.tolist(), *requests[slot]))
            low = wanted <= LAST_RESORT / 200  # penalties change these too, which nobody sees
            assert torch.equal(row <= LAST_RESORT / 200, low)
            assert torch.equal(row == float("-inf"), wanted == float("-inf"))
            torch.testing.assert_close(row[~low], wanted[~low])
        drawn = [choice.choice([choice.randrange(VOCAB), 7]) for _ in slots]
        table.advance(torch.tensor(drawn), slots)
        for slot, token in zip(slots, drawn, strict=True):
            requests[slot][2].append(token)


def test_rows_that_need_nothing_are_not_adjusted():
    table = SamplingTable(3, VOCAB, upload)
    history = array("i", (1, 2)).tobytes()
    params = SamplingParams(), SamplingParams(presence_penalty=1.0), SamplingParams(bad_words=[[1, 2]])
    table.open([Opening(slot, its, 2, (), history) for slot, its in enumerate(params)])
    assert [table.needs_adjusting([slot], [9]) for slot in range(3)] == [False, True, True]
    table.open([Opening(slot, SamplingParams(), 2, ()) for slot in range(3)])
    assert not table.needs_adjusting(range(3), [9] * 3)


def test_a_bad_word_is_drawn_when_all_else_is_forbidden():
    table = SamplingTable(1, VOCAB, upload)
    params = SamplingParams(allowed_token_ids=[3, 4], bad_words=[[3], [4, 4]])
    table.open([Opening(0, params, 1, (), array("i", (9, 4)).tobytes())])
    logits = torch.randn(1, VOCAB)
    table.adjust(logits, [0], [1])
    assert logits[0].argmax() in (3, 4)


def test_repetition_and_bad_words_are_those_of_transformers():
    generator = torch.Generator().manual_seed(0)
    prompt, output = [3, 4, 4, 9], [4, 7, 7, 12]
    table = SamplingTable(1, VOCAB, upload)
    params = SamplingParams(repetition_penalty=1.7, bad_words=[[5], [7, 12, 20], [12, 21], [12, 7, 22], [3, 4]])
    table.open([Opening(0, params, len(prompt), (), array("i", prompt + output).tobytes())])
    logits = torch.randn(1, VOCAB, generator=generator) * 3
    ids = torch.tensor([prompt + output])
    expected = transformers.RepetitionPenaltyLogitsProcessor(1.7)(ids, logits.clone())
    expected = transformers.NoBadWordsLogitsProcessor([list(its) for its in params.bad_words])(ids, expected)
    table.adjust(logits, [0], [7])
    is_bad = expected == float("-inf")
    assert is_bad.nonzero()[:, 1].tolist() == [5, 20, 21]
    assert torch.equal(logits < -1e20, is_bad)
    torch.testing.assert_close(logits[~is_bad], expected[~is_bad])
