from __future__ import annotations

import math
import random as py_random

import msgspec
import pytest
import torch

from tests.ops.kernels import DEVICE, poisoned, random
from tokenmill.sampling.batch import Opening, SamplingTable
from tokenmill.sampling.sampler import exponential as exponential_twin
from tokenmill.sampling.sampler import sample
from tokenmill.types import SamplingParams

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from tokenmill.ops.triton import sampling  # noqa: E402
from tokenmill.ops.triton.noise import log2_exponential, row_key  # noqa: E402
from tokenmill.ops.triton.rows import LIST_ROOM, SPAN, SamplingColumns, make_scratch  # noqa: E402
from tokenmill.ops.triton.sampling import sample_rows  # noqa: E402

ROWS = 200 if torch.cuda.is_available() else 10
VOCAB = 4500  # several blocks, the last with a part of one


@triton.jit
def noise_kernel(out, seed, position, first, SIZE: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    low, high = row_key(tl.load(seed), tl.load(position))
    number = log2_exponential(low, high, tl.load(first).to(tl.int32) + tl.arange(0, SIZE), IS_INTERPRETED)
    tl.store(out + tl.arange(0, SIZE), number)


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, -5, 987654321])
@pytest.mark.parametrize("position", [0, 131071])
def test_noise_is_the_samplers(seed, position):
    for first in (0, 262144 - 4096):
        arguments = [torch.tensor([value], device=DEVICE) for value in (seed, position, first)]
        found = poisoned(4096)
        noise_kernel[(1,)](found, *arguments, SIZE=4096, IS_INTERPRETED=DEVICE.type == "cpu")
        expected = exponential_twin(*arguments[:2], torch.arange(first, first + 4096, device=DEVICE))[0]
        found = found.exp2() * math.log(2)
        few_bits = 1.5 * 2.0**-24 * expected.exp()  # of what is left of 1
        assert ((found - expected).abs() <= 1e-5 * expected + few_bits).all()


def draw(
    logits: torch.Tensor, params: list[SamplingParams], positions: list[int], *, room: int = LIST_ROOM
) -> tuple[list[int], list[int]]:
    """What the kernels and what the sampler draw."""
    rows, vocab = logits.shape
    table = SamplingTable(rows, vocab, lambda its: torch.tensor(its, dtype=torch.int32, device=DEVICE))
    table.open([Opening(slot, its, 0, ()) for slot, its in enumerate(params)])
    columns = SamplingColumns(table.temperature, table.top_k, table.top_p, table.min_p, table.seed, table.is_greedy)
    scratch = make_scratch(rows, vocab, DEVICE, room)
    slots = torch.arange(rows, device=DEVICE).flip(0).to(torch.int32)
    out, last = poisoned(rows, dtype=torch.int64), poisoned(rows + 1, dtype=torch.int64)
    sample_rows(
        logits.flip(0),
        slots,
        torch.tensor(positions[::-1], dtype=torch.int32, device=DEVICE) - 1,
        columns,
        out,
        last,
        scratch,
        has_filters=table.needs_filters(range(rows)),
    )
    assert torch.equal(last[slots.long()], out)
    assert last[rows] == -7
    assert not scratch.counters.any()
    return out.flip(0).tolist(), sample(logits.float().clone(), table, list(range(rows)), positions).tolist()


def any_params(seed: int, *, has_filters: bool) -> list[SamplingParams]:
    choose = py_random.Random(seed)
    return [
        SamplingParams(
            seed=choose.getrandbits(60),
            temperature=choose.choice([0.0, 0.6, 1.0, 2.0]),
            min_p=choose.choice([0.0, 0.0, 0.02, 0.3]) if has_filters else 0.0,
            top_k=choose.choice([0, 0, 1, 3, 40, VOCAB // 2, VOCAB + 1]) if has_filters else 0,
            top_p=choose.choice([1.0, 0.0, 0.2, 0.9, 0.999]) if has_filters else 1.0,
        )
        for _ in range(ROWS)
    ]


@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
def test_plain_draws_are_the_samplers(spread):
    found, expected = draw(random(ROWS, VOCAB) * spread, any_params(0, has_filters=False), list(range(1, ROWS + 1)))
    assert found == expected


def test_plain_draws_from_bfloat16():
    logits = random(ROWS, VOCAB, dtype=torch.bfloat16)
    found, expected = draw(logits, any_params(1, has_filters=False), [9] * ROWS)
    assert found == expected


def test_a_program_may_see_several_blocks(monkeypatch):
    monkeypatch.setattr(sampling, "PROGRAMS", 2 * ROWS)
    found, expected = draw(random(ROWS, VOCAB), any_params(4, has_filters=False), [9] * ROWS)
    assert found == expected


def test_draws_with_min_p_alone_are_the_samplers():
    params = [SamplingParams(seed=seed, temperature=2.0, min_p=0.3 * (seed % 2)) for seed in range(ROWS)]
    found, expected = draw(random(ROWS, VOCAB), params, [2] * ROWS)
    assert found == expected


@pytest.mark.parametrize(("spread", "room"), [(0.01, 4096), (1.0, 4096), (3.0, 4096), (1.0, 32)])
def test_filtered_draws_are_the_samplers(spread, room):
    logits = random(ROWS, VOCAB, seed=3) * spread
    found, expected = draw(logits, any_params(2, has_filters=True), [5] * ROWS, room=room)
    assert found == expected


def kept_in_order(row: torch.Tensor, its: SamplingParams) -> torch.Tensor:
    """The ids that the filters keep, likeliest first and of equals the lowest, by sums in float64."""
    scaled = row.float().cpu() / its.temperature
    order = scaled.sort(descending=True, stable=True).indices
    weights = (scaled[order].double() - scaled.max().double()).exp()
    order = order[: its.top_k or len(row)]
    total = weights[: len(order)].sum()
    is_kept = (weights.cumsum(0) - weights)[: len(order)] < torch.tensor(its.top_p).double() * total
    is_kept &= weights[: len(order)] >= its.min_p
    return order[: max(int(is_kept.sum()), 1)]


def at_the_edge(row: torch.Tensor, its: SamplingParams, position: int) -> tuple[SamplingParams, int]:
    """The parameters with a seed by which the draw comes near the last id kept or the first that is not; the draw."""
    scaled, kept = row.float().cpu() / its.temperature, kept_in_order(row, its)
    more = kept_in_order(row, SamplingParams(top_k=len(kept) + 2, temperature=its.temperature))
    seeds = torch.arange(400)
    score = scaled[more] - exponential_twin(seeds, torch.tensor([position]).expand(400), more).log()  # [seeds, ids]
    best = (score.argmax(1) - len(kept) + 0.5).abs().argmin()
    return msgspec.structs.replace(its, seed=int(best)), int(kept[score[best, : len(kept)].argmax()])


def logits_of(kind: str, rows: int, vocab: int) -> torch.Tensor:
    logits = random(rows, vocab, seed=11)
    if kind == "peaked":  # by id, so that the likely ones stand together
        logits -= 2 * torch.arange(1, vocab + 1, device=DEVICE).log()
    elif kind == "tied":
        logits = (logits * 3).round() / 2
    elif kind == "equal":
        logits = torch.ones_like(logits)
    elif kind == "forbidden":
        logits[:, : vocab // 2] = float("-inf")
        logits[:, ::3] = float("-inf")
    return logits


@pytest.mark.parametrize("room", [LIST_ROOM, 100])
@pytest.mark.parametrize("kind", ["flat", "peaked", "tied", "equal", "forbidden"])
def test_no_more_and_no_less_is_kept_of_rows_of_all_kinds(kind, room):
    spans = -(-VOCAB // SPAN.value)
    logits = logits_of(kind, ROWS, VOCAB)
    choose = py_random.Random(f"{kind} {room}")
    edges = [
        at_the_edge(row, SamplingParams(
            temperature=choose.choice([0.6, 1.0, 2.0]),
            top_k=choose.choice([0, 0, 1, 2, 20, spans - 1, spans, spans + 1, 300, 1500, VOCAB - 1]),
            top_p=choose.choice([1.0, 1e-9, 0.1107, 0.5303, 0.9071, 0.9993]),
            min_p=choose.choice([0.0, 0.0, 0.03]),
        ), 7)
        for row in logits
    ]  # fmt: skip
    found, _ = draw(logits, [its for its, _ in edges], [7] * ROWS, room=room)
    assert found == [token for _, token in edges]


@pytest.mark.parametrize("filters", [{"top_p": 0.9071}, {"top_k": 600}, {"top_k": 600, "top_p": 0.5303}])
def test_rows_of_several_pieces(filters):
    logits = random(3, 20000, seed=12)
    edges = [at_the_edge(row, SamplingParams(**filters), 8) for row in logits]
    for room in (64, LIST_ROOM):
        found, _ = draw(logits, [its for its, _ in edges], [8] * 3, room=room)
        assert found == [token for _, token in edges]


@pytest.mark.parametrize("room", [LIST_ROOM, 8])
@pytest.mark.parametrize("top_k", [20, 300])
def test_top_p_is_a_share_of_what_top_k_leaves_of_equals(top_k, room):
    logits = logits_of("tied", 6, 1000)
    some = [SamplingParams(top_k=top_k, top_p=0.31 + 0.11 * row) for row in range(6)]
    edges = [at_the_edge(row, its, 8) for row, its in zip(logits, some, strict=True)]
    found, _ = draw(logits, [its for its, _ in edges], [8] * 6, room=room)
    assert found == [token for _, token in edges]


@pytest.mark.parametrize("vocab", [1, 7, 2048])
@pytest.mark.parametrize("filters", [{}, {"top_k": 2, "top_p": 0.8}])
def test_vocabularies_of_one_block(vocab, filters):
    params = [SamplingParams(seed=seed, **filters) for seed in range(6)]
    found, expected = draw(random(6, vocab), params, [1] * 6)
    assert found == expected


@pytest.mark.parametrize("room", [4096, 8])
def test_of_equal_logits_the_lowest_ids_are_kept(room):
    logits = torch.zeros(ROWS, 2100, device=DEVICE)
    drawn, _ = draw(logits, [SamplingParams(top_k=3, seed=seed) for seed in range(ROWS)], [0] * ROWS, room=room)
    assert set(drawn) == {0, 1, 2}
    logits[:, 1000:1004] = 30
    drawn, _ = draw(logits, [SamplingParams(top_p=0.45, seed=seed) for seed in range(ROWS)], [0] * ROWS, room=room)
    assert set(drawn) == {1000, 1001}


@pytest.mark.parametrize("programs", [1, 2048])
def test_greedy_takes_the_first_of_equals(monkeypatch, programs):
    monkeypatch.setattr(sampling, "PROGRAMS", programs)
    logits = torch.zeros(3, VOCAB, device=DEVICE)
    logits[0, [900, 1030, 3000]] = 5
    logits[1, [4499, 4498]] = 5
    assert draw(logits, [SamplingParams(temperature=0.0)] * 3, [0] * 3)[0] == [900, 4498, 0]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("vocab", [1, 33, VOCAB])
@pytest.mark.parametrize("fill", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_no_numbers_still_give_an_id(fill, vocab):
    params = [SamplingParams(seed=seed, temperature=0.5 * seed) for seed in range(2)]
    for more in ([], [SamplingParams(seed=9, min_p=0.1), SamplingParams(seed=9, top_k=5, top_p=0.5)]):
        rows = [*params, *more]
        drawn, _ = draw(torch.full((len(rows), vocab), fill, device=DEVICE), rows, [0] * len(rows))
        assert all(0 <= token < vocab for token in drawn)


def test_noise_is_finite_where_rounding_would_make_it_endless():
    arguments = [torch.tensor([value], device=DEVICE) for value in (6, 0, 2985620)]
    found = poisoned(1)
    noise_kernel[(1,)](found, *arguments, SIZE=1, IS_INTERPRETED=DEVICE.type == "cpu")
    assert 15 < found.exp2() * math.log(2) < 17


def test_forbidden_ids_are_never_drawn():
    logits = torch.full((8, VOCAB), float("-inf"), device=DEVICE)  # the last block has no id at all
    logits[:, [17, 2500]] = random(8, 2)
    some = ({}, {"top_k": 50}, {"top_p": 0.9999}, {"top_k": 50, "top_p": 0.9, "min_p": 0.01})
    params = [SamplingParams(seed=seed, **some[seed % 4]) for seed in range(8)]
    found, expected = draw(logits, params, [3] * 8)
    assert found == expected
    assert set(found) <= {17, 2500}


def test_frequencies_follow_the_probabilities():
    rows = 2000 if torch.cuda.is_available() else 60
    logits = torch.full((rows, 50), -1e9, device=DEVICE)
    logits[:, 10:12] = torch.tensor([0.7, 0.3], device=DEVICE).log()
    drawn, _ = draw(logits, [SamplingParams(seed=seed) for seed in range(rows)], [0] * rows)
    assert set(drawn) == {10, 11}
    assert abs(drawn.count(10) / rows - 0.7) < 4 * (0.21 / rows) ** 0.5
