from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.attention.paged import DEVICE, TOLERANCE, Paged
from tokenmill.attention.flashinfer import FlashInferAttention
from tokenmill.attention.reference import ReferenceAttention
from tokenmill.errors import ConfigError

DECODE = [(9, 1), (70, 1), (0, 1), (15, 1), (16, 1), (700, 1)]
PROMPTS = [(0, 7), (62, 4), (64, 65), (15, 2), (0, 300)]
STEPS = {
    "decode": DECODE,
    "prompts": PROMPTS,
    "mixed": [*DECODE[:3], *PROMPTS, *DECODE[3:]],
    "one token": [(0, 1)],
    "one prompt": [(0, 33)],
}


class FakeWrapper:
    """Takes what FlashInfer's wrappers take where this project passes it, and computes it plainly."""

    made: list[FakeWrapper]

    def __init__(self, workspace: Tensor, kv_layout: str, use_tensor_cores: bool | None = None) -> None:
        assert workspace.dtype == torch.uint8
        assert not workspace.any()
        assert kv_layout == "NHD"
        self.use_tensor_cores = use_tensor_cores
        self.planned: Any = None
        self.made.append(self)

    def _plan(
        self, tokens: Tensor, pages: Tensor, indices: Tensor, last: Tensor, shape: tuple[int, ...], options: Any
    ) -> None:
        for numbers in (tokens, pages, last):
            assert numbers.device.type == "cpu"
            assert numbers.dtype == torch.int32
            assert numbers.is_contiguous()
        assert (indices.dtype, indices.device.type) == (torch.int32, DEVICE.type)
        assert len(indices) == pages[-1]
        self.planned = SimpleNamespace(
            tokens=tokens.tolist(), pages=pages.tolist(), indices=indices.tolist(), last=last.tolist(),
            shape=shape, **options,
        )  # fmt: skip

    def run(self, q: Tensor, paged: tuple[Tensor, Tensor], *, out: Tensor, enable_pdl: bool) -> Tensor:
        assert enable_pdl is False
        planned = self.planned
        heads, kv_heads, dim, page_size = planned.shape
        assert q.shape == out.shape == (planned.tokens[-1], heads, dim)
        assert q.dtype == out.dtype == planned.q_data_type
        for row, last in enumerate(planned.last):
            own = slice(planned.tokens[row], planned.tokens[row + 1])
            pages = planned.indices[planned.pages[row] : planned.pages[row + 1]]
            context = (len(pages) - 1) * page_size + last
            assert all(pool.shape[1:] == (page_size, kv_heads, dim) for pool in paged)
            key, value = (pool[pages].flatten(0, 1)[:context].float().nan_to_num() for pool in paged)
            key, value = (its.repeat_interleave(heads // kv_heads, 1) for its in (key, value))
            scores = torch.einsum("qhd,nhd->hqn", q[own].float(), key) * planned.sm_scale
            if planned.logits_soft_cap:
                scores = (scores / planned.logits_soft_cap).tanh() * planned.logits_soft_cap
            length = own.stop - own.start
            scores.masked_fill_(torch.ones_like(scores).triu(context - length + 1).bool(), float("-inf"))
            if planned.window_left >= 0:
                unseen = torch.ones_like(scores).tril(context - length - planned.window_left - 1).bool()
                scores.masked_fill_(unseen, float("-inf"))
            out[own] = torch.einsum("hqn,nhd->qhd", scores.softmax(2), value).to(out.dtype)
        return out


class FakeDecode(FakeWrapper):
    def plan(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int,
        head_dim: int, page_size: int, *, sm_scale: float, q_data_type: torch.dtype, window_left: int = -1,
        logits_soft_cap: float | None = None,
    ) -> None:  # fmt: skip
        options = {"sm_scale": sm_scale, "q_data_type": q_data_type}
        options |= {"window_left": window_left, "logits_soft_cap": logits_soft_cap}
        tokens = torch.arange(len(indptr), dtype=torch.int32)
        self._plan(tokens, indptr, indices, last_page_len, (num_qo_heads, num_kv_heads, head_dim, page_size), options)


class FakePrefill(FakeWrapper):
    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, *, causal: bool, sm_scale: float,
        q_data_type: torch.dtype, window_left: int = -1, logits_soft_cap: float | None = None,
    ) -> None:  # fmt: skip
        assert causal
        options = {"sm_scale": sm_scale, "q_data_type": q_data_type}
        options |= {"window_left": window_left, "logits_soft_cap": logits_soft_cap}
        shape = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self._plan(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, shape, options)


@pytest.fixture
def wrappers(monkeypatch: pytest.MonkeyPatch) -> list[FakeWrapper]:
    """A fake FlashInfer, and the wrappers that are made of it."""
    monkeypatch.setattr(FakeWrapper, "made", [], raising=False)
    fake = SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=FakeDecode, BatchPrefillWithPagedKVCacheWrapper=FakePrefill
    )
    monkeypatch.setitem(sys.modules, "flashinfer", fake)  # type: ignore[arg-type]
    return FakeWrapper.made


def backend_of(case: Paged, **options: Any) -> FlashInferAttention:
    heads, dim = case.query.shape[1:]
    return FlashInferAttention(
        scale=case.scale, num_heads=heads, num_kv_heads=case.kv.keys.shape[2], head_dim=dim, dtype=case.dtype,
        device=DEVICE, **options,
    )  # fmt: skip


@pytest.mark.parametrize("page", [1, 3, 16])
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS)
def test_planned_numbers_lead_to_the_right_tokens(
    wrappers: list[FakeWrapper], rows: list[tuple[int, int]], page: int
) -> None:
    case = Paged(rows, page=page)
    backend = backend_of(case)
    metadata = backend.plan(case.layout, case.table, case.page)
    assert isinstance(metadata, FakeDecode if all(length == 1 for _, length in rows) else FakePrefill)
    case.check(backend.run(case.query, case.kv, 1, metadata))


@pytest.mark.parametrize(("window", "cap"), [(1, 0.0), (5, 0.0), (16, 2.0), (0, 2.0), (64, 0.0), (1000, 0.0)])
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS)
def test_windows_and_caps(wrappers: list[FakeWrapper], rows: list[tuple[int, int]], window: int, cap: float) -> None:
    case = Paged(rows, page=3, window=window, cap=cap)
    backend = backend_of(case, window=window, cap=cap)
    case.check(backend.run(case.query, case.kv, 1, backend.plan(case.layout, case.table, case.page)))


def test_what_is_planned_for_a_mixed_step(wrappers: list[FakeWrapper]) -> None:
    case = Paged([(8, 1), (0, 4), (6, 3)], page=4)
    planned = backend_of(case).plan(case.layout, case.table, case.page).planned
    table = case.table.tolist()
    first, second, third = case.layout.slots
    assert planned.tokens == [0, 1, 5, 8]
    assert planned.pages == [0, 3, 4, 7]
    assert planned.indices == [*table[first][:3], *table[second][:1], *table[third][:3]]
    assert planned.last == [1, 4, 1]
    assert planned.shape == (4, 2, 16, 4)


@pytest.mark.parametrize("rows", [DECODE, PROMPTS])
def test_a_plan_outlives_the_next_one(wrappers: list[FakeWrapper], rows: list[tuple[int, int]]) -> None:
    case = Paged(rows)
    backend = backend_of(case)
    metadata = backend.plan(case.layout, case.table, case.page)
    one = Paged(rows[:1], seed=1)
    backend.plan(one.layout, one.table, one.page)
    case.check(backend.run(case.query, case.kv, 1, metadata))


@pytest.mark.parametrize(("heads", "uses"), [(2, False), (6, False), (8, True), (14, True)])
def test_large_groups_of_heads_use_tensor_cores(wrappers: list[FakeWrapper], heads: int, uses: bool) -> None:
    backend_of(Paged([(0, 1)], heads=heads, kv_heads=2))
    assert [its.use_tensor_cores for its in wrappers if isinstance(its, FakeDecode)] == [uses, uses]


@pytest.mark.parametrize("lengths", [(1,), (2,), (1, 2)])
def test_kernels_are_compiled_at_the_start_for_the_rows_that_will_come(
    wrappers: list[FakeWrapper], lengths: tuple[int, ...]
) -> None:
    backend_of(Paged([(0, 1)]), lengths=lengths)
    compiled = {type(its) for its in wrappers if its.planned is not None}
    assert compiled == {FakeDecode if length == 1 else FakePrefill for length in lengths}


def test_kernels_that_do_not_compile_are_told(wrappers: list[FakeWrapper], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("Ninja build failed.")

    monkeypatch.setattr(FakePrefill, "plan", fail)
    with pytest.raises(ConfigError, match=r"--attention flashinfer .*Ninja build failed"):
        backend_of(Paged([(0, 1)]))


def test_a_package_that_does_not_load_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--attention flashinfer"):
        backend_of(Paged([(0, 1)]))


@pytest.mark.skipif(
    DEVICE.type != "cuda" or importlib.util.find_spec("flashinfer") is None, reason="needs FlashInfer and a GPU"
)
@pytest.mark.filterwarnings("default")  # FlashInfer's own are no fault here
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS)
def test_real_kernels_equal_the_reference(rows: list[tuple[int, int]]) -> None:
    case = Paged(rows, heads=16, kv_heads=8, dim=128, page=16, dtype=torch.bfloat16)
    backend = backend_of(case)
    result = backend.run(case.query, case.kv, 1, backend.plan(case.layout, case.table, case.page))
    reference = ReferenceAttention(scale=case.scale, token_elements=8 * 128)
    expected = reference.run(case.query, case.kv, 1, reference.plan(case.layout, case.table.long(), case.page))
    torch.testing.assert_close(result, expected, atol=TOLERANCE[case.dtype], rtol=TOLERANCE[case.dtype])
