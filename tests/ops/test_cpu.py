"""The C kernels against their twins, for this processor, for one with AVX2 only, and in plain C."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from tests.attention.paged import Paged
from tokenmill.attention.cpu import CpuAttention
from tokenmill.ops.cpu import kernels as its
from tokenmill.ops.cpu.kernels import CpuKernels, _compiled, compiled
from tokenmill.ops.cpu.packed import FLOATS, KINDS, PackedMatrix, reference_linear
from tokenmill.sampling.grammar import apply_masks

pytestmark = pytest.mark.skipif(not any(map(shutil.which, its.COMPILERS)), reason="no C compiler")
FLAGS = {"native": (), "avx2": ("-mavx2", "-mfma", "-mf16c"), "plain": ("-DNDEBUG",)}
ROWS = {"decode": [(9, 1), (70, 1), (0, 1), (200, 1)], "prompts": [(0, 7), (62, 4), (64, 65), (0, 1), (15, 2)]}


@pytest.fixture(params=FLAGS, scope="module")
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    if request.param == "avx2" and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"no AVX2 on {platform.machine()}")
    return CpuKernels(compiled(FLAGS[request.param]), 2)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0"])
def test_what_a_file_holds_is_kept(kernels: CpuKernels, name: str) -> None:
    kind, bits = KINDS[name]
    lines = quantize(numbers(40, 96).numpy(), GGMLQuantizationType(kind))
    matrix = PackedMatrix(40, 96, bits)
    for first in (0, 32):
        matrix.fill(kernels, torch.from_numpy(lines[first : first + 32]), first, kind)
    expected = torch.from_numpy(dequantize(lines, GGMLQuantizationType(kind)))
    torch.testing.assert_close(matrix.expanded(), expected, atol=1e-6, rtol=1e-6)


def test_k_quants_are_kept(kernels: CpuKernels) -> None:
    kind, bits = KINDS["Q4_K"]
    lines = np.random.default_rng(0).integers(0, 256, (20, 2 * 144), np.uint8)
    for block in (0, 144):
        lines[:, block : block + 4] = np.array([0.01, 0.02], np.float16).view(np.uint8)
    matrix = PackedMatrix(20, 512, bits)
    matrix.fill(kernels, torch.from_numpy(lines), 0, kind)
    expected = torch.from_numpy(dequantize(lines, GGMLQuantizationType(kind)))
    torch.testing.assert_close(matrix.expanded(), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("bits", "error"), [(8, 0.01), (4, 0.1)])
def test_plain_numbers_are_packed(kernels: CpuKernels, bits: int, error: float) -> None:
    lines = numbers(37, 64)
    lines[3, :32] = 0.0
    lines[4, :32] = 2.5
    matrix = PackedMatrix(37, 64, bits)
    matrix.fill(kernels, lines.to(torch.bfloat16), 0, FLOATS)
    assert (matrix.expanded() - lines).norm() < error * lines.norm()
    assert not matrix.expanded()[3, :32].any()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 13, 70])
def test_products_are_those_of_the_twin(kernels: CpuKernels, rows: int, bits: int) -> None:
    matrix = PackedMatrix(53, 160, bits, numbers(53, seed=2))
    matrix.fill(kernels, numbers(53, 160), 0, FLOATS)
    x = numbers(rows, 160, seed=1)
    x[0, :32] = 0.0
    torch.testing.assert_close(kernels.linear(matrix.struct, x), reference_linear(matrix, x), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "page"), [(4, 2, 16, 4), (9, 3, 64, 16), (5, 1, 80, 7)])
def test_attention_is_exact(
    kernels: CpuKernels, heads: int, kv_heads: int, dim: int, page: int, rows: str, dtype: torch.dtype
) -> None:
    paged = Paged(ROWS[rows], heads=heads, kv_heads=kv_heads, dim=dim, page=page, dtype=dtype)
    shape = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim}
    attention = CpuAttention(kernels, scale=paged.scale, **shape)
    metadata = attention.plan(paged.layout, paged.table, paged.page)
    found = attention.run(paged.query, paged.kv, 1, metadata)
    tolerance = 2e-5 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(found.double(), paged.expected(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("vocab", [1, 31, 32, 100, 1000])
def test_masks_are_those_of_the_twin(kernels: CpuKernels, vocab: int) -> None:
    words = vocab // 32 + 1
    masks = torch.randint(-(1 << 31), 1 << 31, (4, words), generator=torch.Generator().manual_seed(vocab)).int()
    masks[1], masks[2] = 0, -1
    logits, rows = numbers(6, vocab), torch.tensor([4, 0, 5, 2])
    logits[4, 0] = float("-inf")
    expected = logits.clone()
    dead = apply_masks(expected, rows, masks)
    assert kernels.apply_masks(logits, rows, masks).equal(dead)
    assert logits.equal(expected)
    assert dead[0]


def test_a_library_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path))
    first = compiled(("-O1",))
    made = first.stat().st_mtime_ns
    assert compiled(("-O1",)) == first
    assert first.stat().st_mtime_ns == made
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_a_damaged_library_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path))
    flags = "-O1", "-DDAMAGED"  # of no library that this process has loaded: it would be found in memory
    key = _compiled(flags)
    key.write_bytes(b"")
    assert compiled(flags) == key
    assert key.stat().st_size > 0


def test_what_cannot_be_compiled_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path))
    with pytest.raises(OSError, match="cannot compile"):
        compiled(("-mthere-is-no-such-flag",))
    assert not list((tmp_path / "kernels").iterdir())
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(OSError, match="no C compiler in PATH"):
        compiled()
