from __future__ import annotations

import pytest

from tokenmill.engine.graphs import batch_sizes


@pytest.mark.parametrize("most", [1, 2, 3, 5, 8, 9, 64, 100, 256])
def test_every_batch_has_a_size_that_holds_it_and_wastes_little(most):
    sizes = batch_sizes(most)
    assert sizes == sorted(set(sizes))
    for rows in range(1, most + 1):
        size = next(size for size in sizes if size >= rows)
        assert size - rows < 8
        assert size < 2 * rows or size == 1


def test_no_graphs():
    assert batch_sizes(0) == []
