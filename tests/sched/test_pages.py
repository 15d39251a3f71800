from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.sched.pages import PagePool


@given(st.lists(st.integers(0, 6), max_size=30), st.randoms(use_true_random=False))
def test_each_page_is_out_once_or_free(counts, random):
    pool = PagePool(12)
    out: list[list[int]] = []
    for count in counts:
        if count <= pool.num_free:
            out.append(pool.allocate(count))
            assert len(out[-1]) == count
        elif out:
            pool.release(out.pop(random.randrange(len(out))))
        taken = [page for pages in out for page in pages]
        assert sorted([*taken, *pool.free_pages()]) == list(range(12))
        assert pool.num_free == 12 - len(taken)


def test_more_than_there_is_changes_nothing():
    pool = PagePool(3)
    with pytest.raises(AssertionError, match="4 pages"):
        pool.allocate(4)
    assert sorted(pool.allocate(3)) == [0, 1, 2]
    assert pool.allocate(0) == []


def test_the_page_freed_last_is_handed_out_first():
    pool = PagePool(4)
    first, second = pool.allocate(1), pool.allocate(1)
    pool.release(first)
    assert pool.allocate(1) == first
    pool.release(second)
    assert pool.allocate(1) == second
