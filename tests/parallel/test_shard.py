import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.errors import ConfigError
from tokenmill.parallel.shard import Span, check_size, split_evenly, split_inner, split_kv_heads, split_vocabulary
from tokenmill.spec import ExpertsSpec, ModelSpec


@given(share=st.integers(1, 50), size=st.integers(1, 16))
def test_even_shares_cover_the_whole_once(share: int, size: int) -> None:
    spans = [split_evenly(share * size, rank, size, "heads") for rank in range(size)]
    assert [i for span in spans for i in range(span.start, span.stop)] == list(range(share * size))


def test_uneven_shares_are_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match="9 attention heads cannot be split over 2 ranks"):
        split_evenly(9, 0, 2, "attention heads")


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "expected"),
    [
        (9, 3, 1, [(0, 3)]),
        (9, 3, 3, [(0, 1), (1, 2), (2, 3)]),
        (9, 3, 9, [(0, 1)] * 3 + [(1, 2)] * 3 + [(2, 3)] * 3),
        (8, 2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
    ],
)
def test_each_rank_has_the_kv_heads_of_its_heads(
    heads: int, kv_heads: int, size: int, expected: list[tuple[int, int]]
) -> None:
    spans = [split_kv_heads(heads, kv_heads, rank, size) for rank in range(size)]
    assert spans == [Span(*pair) for pair in expected]
    for rank, span in enumerate(spans):
        own = split_evenly(heads, rank, size, "heads")
        needed = {head * kv_heads // heads for head in range(own.start, own.stop)}
        assert needed == set(range(span.start, span.stop))


def test_kv_heads_that_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(ConfigError, match="K/V heads"):
        split_kv_heads(12, 4, 0, 6)
    with pytest.raises(ConfigError, match="K/V heads"):
        split_kv_heads(12, 3, 0, 2)


@given(vocab=st.integers(1, 1000), size=st.integers(1, 9))
def test_vocabulary_is_covered_once_and_fits_the_rows(vocab: int, size: int) -> None:
    parts = [split_vocabulary(vocab, rank, size) for rank in range(size)]
    assert [i for span, _ in parts for i in range(span.start, span.stop)] == list(range(vocab))
    assert len({rows for _, rows in parts}) == 1
    assert all(span.size <= rows for span, rows in parts)
    assert all(span.start == min(rank * rows, vocab) for rank, (span, rows) in enumerate(parts))


def test_scaled_counts_parts_of_each() -> None:
    assert Span(2, 5).scaled(64) == Span(128, 320)


@given(total=st.integers(1, 4096), size=st.integers(1, 16))
def test_inner_dimensions_are_covered_once_by_shares_that_are_near(total: int, size: int) -> None:
    if total < size:
        with pytest.raises(ConfigError, match="inner dimensions"):
            split_inner(total, 0, size)
        return
    spans = [split_inner(total, rank, size) for rank in range(size)]
    assert [i for span in spans for i in range(span.start, span.stop)] == list(range(total))
    assert all(span.size for span in spans)
    assert max(span.size for span in spans) - min(span.size for span in spans) <= 64


def test_sizes_that_can_be_are_told() -> None:
    smollm = ModelSpec("llama", 49152, 576, 1536, 30, 9, 3, 64, 8192)
    for size in (1, 3, 9):
        check_size(smollm, size)
    with pytest.raises(ConfigError, match=r"9 attention heads .* over 2 ranks: for this model, --tp can be 1, 3, 9$"):
        check_size(smollm, 2)
    mixture = ModelSpec("qwen3_moe", 100, 64, 96, 2, 8, 2, 8, 64, experts=ExpertsSpec(4, 2, 4))
    with pytest.raises(ConfigError, match=r"4 inner dimensions .* over 8 ranks: for this model, --tp can be 1, 2, 4$"):
        check_size(mixture, 8)
