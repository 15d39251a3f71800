"""The streaming product. Without a GPU its own code runs on stand-ins, as early and as late as those may be."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.ops.kernels import GATES, random

pytest.importorskip("triton")

from tokenmill.ops.triton import stream as module
from tokenmill.ops.triton.gemv import appended
from tokenmill.ops.triton.stream import StreamConfig, pieces_of, stream

BF16 = torch.bfloat16
CONFIGS = {
    "one piece": StreamConfig(64, 64, 4, stages=3, x_stages=2),
    "three pieces": StreamConfig(112, 128, 8, stages=2, x_stages=3),
    "wide": StreamConfig(32, 128, 4, stages=4, x_stages=4, block_k=128),
}


class Memory:
    """Shared memory, and a barrier at each of its places."""

    def __init__(self, shape, dtype):
        self.values = torch.full(shape, float("nan") if dtype.is_floating_point else 0, dtype=dtype)
        self.barriers = [SimpleNamespace(missing=0, phase=0) for _ in range(shape[0])]

    def index(self, place):
        if self.values.dtype == torch.int64:
            return self.barriers[place]
        return SimpleNamespace(view=self.values[place], permute=lambda order: self.values[place].T)


class Pointer:
    """An array's address, or addresses in it."""

    def __init__(self, array, at=0):
        self.array, self.at = array, at
        self.dtype = SimpleNamespace(element_ty=array.dtype)

    def __add__(self, at):
        return Pointer(self.array, at)


class StandIns:
    """What the kernel calls: a copy is done at once, a product as late as a wait allows it, so each shows its race."""

    def __init__(self):
        self.program, self.products = [0, 0, 0], []
        self.gl = SimpleNamespace(
            NVMMASharedLayout=module.gl.NVMMASharedLayout, float32=torch.float32, int64=torch.int64,
            minimum=min, static_range=range,
            program_id=lambda axis: self.program[axis], full=lambda shape, value, *_: torch.full(shape, value),
            allocate_shared_memory=lambda dtype, shape, layout: Memory(shape, dtype), SliceLayout=lambda *_: None,
            arange=lambda start, end, layout: torch.arange(start, end), convert_layout=lambda value, layout: value,
            load=self.load, store=self.store,
        )  # fmt: skip
        self.mbarrier = SimpleNamespace(
            init=lambda barrier, count: None, expect=self.expect, wait=self.wait, MBarrierLayout=lambda: None
        )
        self.tma = SimpleNamespace(async_copy_global_to_shared=self.copy)

    def load(self, pointer, mask, other):
        return torch.where(mask, pointer.array.flatten()[pointer.at.clamp(max=pointer.array.numel() - 1)], other)

    def store(self, pointer, values, mask):
        pointer.array.view(-1)[pointer.at[mask]] = values[mask]

    def expect(self, barrier, size, pred):
        if pred:
            assert barrier.missing == 0
            barrier.missing = size

    def copy(self, source, at, barrier, place, pred):
        if pred:
            block = source.base[at[0] : at[0] + source.block_shape[0], at[1] : at[1] + source.block_shape[1]]
            place.view.zero_()
            place.view[: block.shape[0], : block.shape[1]] = block
            barrier.missing -= place.view.numel() * place.view.element_size()
            barrier.phase += barrier.missing == 0

    def wait(self, barrier, parity):
        assert barrier.phase % 2 != parity  # else it would wait for ever, as nothing else runs

    def product(self, first, second, total, *, is_async):
        self.products.append((first.view, second, total))
        return total

    def wait_for_products(self, most, deps):
        while len(self.products) > most:
            first, second, total = self.products.pop(0)
            total += first.float() @ second.float()
        return deps[0] if len(deps) == 1 else deps


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    """Where there is no GPU, a launch runs the kernel's code for each program of its grid."""
    if torch.cuda.is_available():
        return
    kernel, made = module._stream_kernel.fn, StandIns()

    class Kernel:
        def __getitem__(self, grid):
            def launch(x, x_more, x_most, weight, bias, out, *numbers, **options):
                bias = None if bias is None else Pointer(bias)
                for made.program in torch.cartesian_prod(*map(torch.arange, grid)).tolist():
                    kernel(x, x_more, x_most, weight, bias, Pointer(out), *numbers, **options)

            return launch

    for name in ("_zeros", "_room", "_request", "_wait"):
        monkeypatch.setattr(module, name, getattr(module, name).fn)
    for name in ("_accumulator", "_along_lines"):
        monkeypatch.setattr(module, name, lambda *_: None)
    monkeypatch.setattr(module, "_stream_kernel", Kernel())
    monkeypatch.setattr(module, "appended", appended.fn)
    monkeypatch.setattr(module, "gated", lambda gate, up, name: GATES[name](gate) * up)
    for name in ("mbarrier", "tma"):
        monkeypatch.setattr(module, name, getattr(made, name))
    monkeypatch.setattr(module, "warpgroup_mma", made.product)
    monkeypatch.setattr(module, "warpgroup_mma_wait", made.wait_for_products)
    monkeypatch.setattr(module, "gl", made.gl)
    monkeypatch.setattr(module, "TensorDescriptor", SimpleNamespace(from_tensor=descriptor))


def descriptor(tensor, block_shape, layout):
    return SimpleNamespace(base=tensor, block_shape=block_shape, dtype=tensor.dtype, layout=layout)


def error_of(found, expected):
    return float((found.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("gate", [None, *GATES])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(5, 40, 72), (112, 192, 520), (130, 130, 192)])
def test_product(rows, outputs, inputs, gate, name):
    config = CONFIGS[name]
    if gate and config.lines == 64:
        config = StreamConfig(64, 256, 8, stages=3, x_stages=2)
    lines = outputs if gate is None else 2 * outputs
    x, weight = random(rows, inputs, dtype=BF16), random(lines, inputs, seed=1, dtype=BF16) * inputs**-0.5
    expected = x.float() @ weight.float().T
    if gate is not None:
        expected = GATES[gate](expected[:, :outputs]) * expected[:, outputs:]
    found = stream(x, weight, config, gate=gate)
    assert found.dtype == BF16
    assert error_of(found, expected) < 5e-3


@pytest.mark.parametrize("splits", [1, 3, 5])
@pytest.mark.parametrize("name", CONFIGS)
def test_parts_add_up(name, splits):
    x, weight = random(70, 408, dtype=BF16), random(100, 408, seed=1, dtype=BF16)
    config = CONFIGS[name]
    found = stream(x, weight, StreamConfig(config.rows, config.lines, config.num_warps, 3, 2, config.block_k, splits))
    assert found.shape == (splits, 70, 100)
    assert error_of(found.sum(0), x.float() @ weight.float().T) < 1e-5


def test_bias():
    x, weight, bias = (random(*shape, seed=9, dtype=BF16) for shape in [(33, 128), (70, 128), (70,)])
    found = stream(x, weight, CONFIGS["one piece"], bias=bias)
    assert error_of(found, x.float() @ weight.float().T + bias.float()) < 5e-3


def test_parts_are_of_the_plain_product():
    config = StreamConfig(64, 64, 4, stages=3, x_stages=2, splits=2)
    with pytest.raises(ValueError, match="only one of a bias, a gate, and splits"):
        stream(random(5, 64, dtype=BF16), random(64, 64, dtype=BF16), config, gate="silu")


def test_pieces():
    assert pieces_of(224) == (128, 64, 32)
    assert all(sum(pieces_of(rows)) == rows for rows in range(16, 512, 16))
