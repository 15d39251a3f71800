from __future__ import annotations

from array import array

import pytest
import torch

from tokenmill.sampling.batch import Opening, SamplingTable
from tokenmill.sampling.sampler import exponential, sample
from tokenmill.types import SamplingParams

VOCAB = 3000
DRAWS = 400


def logits_of(seed: int, rows: int = 1, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def upload(numbers: array) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def draw(logits: torch.Tensor, params: list[SamplingParams], position: int = 5, blocked: tuple[int, ...] = ()):
    table = SamplingTable(len(params), VOCAB, upload)
    table.open([Opening(slot, its, 3, blocked) for slot, its in enumerate(params)])
    slots, positions = list(range(len(params))), [position] * len(params)
    logits = logits.clone()
    table.adjust(logits, slots, [position - 1] * len(params))
    return sample(logits, table, slots, positions).tolist()


def support(params: SamplingParams, row: torch.Tensor) -> set[int]:
    """Every id that is drawn over many seeds."""
    many = [SamplingParams(**{**as_dict(params), "seed": seed}) for seed in range(DRAWS)]
    return set(draw(row.expand(DRAWS, -1), many))


def as_dict(params: SamplingParams) -> dict[str, object]:
    return {name: getattr(params, name) for name in params.__struct_fields__}


def test_greedy_takes_the_likeliest():
    row = logits_of(0)
    best = row.argmax().item()
    for params in (
        SamplingParams(temperature=0),
        SamplingParams(temperature=1e-5, seed=1),
        SamplingParams(top_k=1, seed=1),
        SamplingParams(top_p=1e-6, seed=1),
        SamplingParams(top_p=0.0, seed=1),
        SamplingParams(min_p=1.0, seed=1),
    ):
        assert draw(row, [params]) == [best]


def test_top_k_keeps_exactly_the_k_likeliest():
    row = logits_of(1, spread=0.1)
    likeliest = set(row[0].topk(3).indices.tolist())
    assert support(SamplingParams(top_k=3), row) == likeliest
    ties = torch.zeros(1, VOCAB)
    assert len(support(SamplingParams(top_k=3), ties)) == 3


@pytest.mark.parametrize("spread", [0.01, 2.0, 6.0])
@pytest.mark.parametrize("top_p", [0.2, 0.7, 0.95])
def test_top_p_keeps_the_smallest_set_that_reaches_it(spread, top_p):
    row = logits_of(2, spread=spread)
    probabilities, order = row[0].double().softmax(-1).sort(descending=True)
    size = int((probabilities.cumsum(0) < top_p).sum()) + 1
    kept = set(order[: size + 1].tolist())
    drawn = support(SamplingParams(top_p=top_p), row)
    assert drawn <= kept
    assert int(order[0]) in drawn or spread < 1


def test_top_p_counts_within_top_k():
    row = torch.full((1, VOCAB), -20.0)
    row[0, :4] = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1]))
    assert support(SamplingParams(top_k=3, top_p=0.5), row) == {0, 1}
    assert support(SamplingParams(top_p=0.75), row) == {0, 1, 2}


def test_min_p_drops_the_unlikely_with_and_without_ranks():
    row = torch.full((1, VOCAB), -20.0)
    row[0, :4] = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    assert support(SamplingParams(min_p=0.25), row) == {0, 1, 2}
    assert support(SamplingParams(min_p=0.25, top_p=0.999), row) == {0, 1, 2}


def test_frequencies_follow_the_probabilities():
    row = torch.full((1, VOCAB), -1e9)
    weights = torch.tensor([0.5, 0.3, 0.2])
    row[0, 100:103] = weights.log() * 0.5
    many = [SamplingParams(temperature=0.5, seed=seed) for seed in range(2000)]
    for extra in ({}, {"top_p": 0.9999}):
        params = [SamplingParams(**{**as_dict(its), **extra}) for its in many]
        counts = torch.bincount(torch.tensor(draw(row.expand(len(params), -1), params)), minlength=VOCAB)
        assert counts.sum() == counts[100:103].sum()
        assert (counts[100:103] / len(params) - weights).abs().max() < 0.04


def test_a_draw_does_not_depend_on_its_neighbours():
    rows = logits_of(3, rows=6)
    params = [
        SamplingParams(seed=1),
        SamplingParams(temperature=0),
        SamplingParams(seed=2, top_p=0.9),
        SamplingParams(seed=3, top_k=40),
        SamplingParams(seed=4, min_p=0.05),
        SamplingParams(seed=5, temperature=5.0, top_p=0.999),
    ]
    together = draw(rows, params)
    assert together == [draw(rows[i : i + 1], [params[i]])[0] for i in range(6)]
    assert together[::-1] == draw(rows.flip(0), params[::-1])


def test_the_draw_changes_with_seed_and_position():
    row = torch.zeros(1, VOCAB)
    assert len({draw(row, [SamplingParams(seed=seed)])[0] for seed in range(50)}) > 40
    assert len({draw(row, [SamplingParams(seed=7)], position)[0] for position in range(50)}) > 40


def test_noise_is_exponential_and_independent():
    ids = torch.arange(20_000)
    rows = torch.tensor([0, 1, 2**62, 1, -5])
    numbers = exponential(rows, torch.tensor([0, 0, 0, 1, 9]), ids)
    assert numbers.shape == (5, 20_000)
    assert numbers.min() > 0
    for row in numbers:
        assert abs(row.mean() - 1) < 0.03
        assert abs((row < 0.1).double().mean() - 0.0952) < 0.008
        assert abs(torch.corrcoef(torch.stack([row[1:], row[:-1]]))[0, 1]) < 0.03
    assert (torch.corrcoef(numbers) - torch.eye(5)).abs().max() < 0.03
    assert torch.equal(exponential(rows, torch.tensor([0, 0, 0, 1, 9]), ids.expand(5, -1)), numbers)


def test_an_error_in_the_last_bits_hardly_ever_changes_a_draw():
    rows = logits_of(8, rows=1000)
    params = [SamplingParams(temperature=1.5, seed=seed, top_p=0.9 if seed % 2 else 1.0) for seed in range(1000)]
    nudged = rows + torch.randn(rows.shape, generator=torch.Generator().manual_seed(9)) * 1e-6
    changed = sum(a != b for a, b in zip(draw(rows, params), draw(nudged, params), strict=True))
    assert changed <= 1


def test_bias_is_added_and_stays_with_its_row():
    rows = logits_of(4, rows=2)
    biased = SamplingParams(temperature=0, logit_bias={17: 100.0})
    plain = SamplingParams(temperature=0)
    assert draw(rows, [biased, plain]) == [17, rows[1].argmax().item()]
    assert draw(rows, [SamplingParams(temperature=0, logit_bias={int(rows[0].argmax()): -100.0}), plain])[0] != (
        rows[0].argmax().item()
    )


def test_end_ids_are_blocked_until_min_tokens():
    row = torch.zeros(1, VOCAB)
    row[0, 9] = 50
    params = SamplingParams(temperature=0, min_tokens=2)
    assert draw(row, [params], position=3, blocked=(9,)) != [9]
    assert draw(row, [params], position=4, blocked=(9,)) != [9]
    assert draw(row, [params], position=5, blocked=(9,)) == [9]


def test_rows_need_adjusting_while_ends_are_blocked_and_always_with_a_bias():
    table = SamplingTable(3, VOCAB, upload)
    params = SamplingParams(min_tokens=2), SamplingParams(logit_bias={1: 1.0}), SamplingParams()
    table.open([Opening(slot, its, 3, (9,) if its.min_tokens else ()) for slot, its in enumerate(params)])
    assert [table.needs_adjusting([2, 0], [50, last]) for last in (2, 3, 4)] == [True, True, False]
    assert table.needs_adjusting([0, 1], [50, 50])
    assert not table.needs_adjusting([2], [0])
    assert not table.needs_adjusting([], [])


def test_a_slot_forgets_the_request_before():
    table = SamplingTable(1, VOCAB, upload)
    table.open([Opening(0, SamplingParams(seed=1, logit_bias={5: 100.0}, min_tokens=9), 0, (6,))])
    table.open([Opening(0, SamplingParams(temperature=0), 0, ())])
    row = torch.zeros(1, VOCAB)
    row[0, 6] = 1
    table.adjust(row, [0], [0])
    assert sample(row, table, [0], [0]).tolist() == [6]


def test_min_p_is_a_filter_that_needs_no_order():
    table = SamplingTable(3, VOCAB, upload)
    params = SamplingParams(), SamplingParams(min_p=0.1), SamplingParams(top_p=0.9)
    table.open([Opening(slot, its, 0, ()) for slot, its in enumerate(params)])
    assert [table.needs_filters([slot]) for slot in range(3)] == [False, True, True]
    assert [table.is_filtered_slot(slot) for slot in range(3)] == [False, False, True]
    table.open([Opening(1, SamplingParams(temperature=0, min_p=0.1), 0, ()), Opening(2, SamplingParams(), 0, ())])
    assert not table.needs_filters(range(3))


def naive_draw(row: torch.Tensor, params: SamplingParams, position: int) -> int:
    """The same draw by its definition, in float64 over all ids."""
    probabilities, order = (row.double() / params.temperature).softmax(-1).sort(descending=True)
    keep = torch.ones(len(row), dtype=torch.bool)
    if params.top_k > 0:
        keep[params.top_k :] = False
    keep &= probabilities.cumsum(0) - probabilities < params.top_p * probabilities[keep].sum()
    keep &= probabilities >= params.min_p * probabilities[0]
    keep[0] = True
    times = exponential(torch.tensor([params.seed]), torch.tensor([position]), order).double()[0]
    return int(order[torch.where(keep, probabilities / times, -1.0).argmax()])


@pytest.mark.parametrize("top_k", [0, 5, 1000, 1500, VOCAB])
@pytest.mark.parametrize("top_p", [1.0, 0.5, 0.01])
@pytest.mark.parametrize("spread", [0.3, 2.0])
def test_draws_are_those_of_the_definition(top_k, top_p, spread):
    rows = logits_of(10, rows=16, spread=spread)
    params = [
        SamplingParams(temperature=0.8, top_k=top_k, top_p=top_p, min_p=0.2 * (seed % 2), seed=seed)
        for seed in range(16)
    ]
    assert draw(rows, params) == [naive_draw(row, its, 5) for row, its in zip(rows, params, strict=True)]


def test_noise_is_finite_where_rounding_would_make_it_endless():
    hashed_to_the_top = torch.tensor([2985620])
    (time,) = exponential(torch.tensor([6]), torch.tensor([0]), hashed_to_the_top)[0]
    assert 16 < time < 17


@pytest.mark.parametrize("fill", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_no_numbers_still_give_an_id(fill):
    for params in ({"temperature": 0}, {}, {"top_p": 0.5}, {"top_k": 3, "min_p": 0.5}, {"top_k": 2000}):
        (token,) = draw(torch.full((1, VOCAB), fill), [SamplingParams(seed=1, **params)])
        assert 0 <= token < VOCAB


def test_the_only_id_that_is_not_blocked_is_drawn():
    blocked = tuple(token for token in range(VOCAB) if token != 77)
    for params in ({"temperature": 0}, {}, {"top_p": 0.5}, {"min_p": 1.0}, {"top_k": 2000}):
        its = SamplingParams(seed=3, min_tokens=9, logit_bias={77: -100.0}, **params)
        assert draw(torch.zeros(1, VOCAB), [its], blocked=blocked) == [77]
