"""Matrices that stay packed: what they are made of, and their reference twin."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from tokenmill.ops.cpu.kernels import CpuKernels, Matrix

BLOCK = 32  # inputs that share a scale
LANES = 16  # lines of a tile
BLOCK_BYTES = {4: 320, 8: 544}  # of a tile's block
FLOATS = 0
KINDS: Mapping[str, tuple[int, int]] = MappingProxyType(  # GGUF's types that are kept: their number there, and bits
    {"Q4_0": (2, 4), "Q4_1": (3, 4), "Q8_0": (8, 8), "Q4_K": (12, 4)}
)


class PackedMatrix:
    """A matrix [lines, inputs] of 4 or 8 bits in tiles (see linear.h); `struct` is what C takes.

    Inputs are a multiple of 32. `fill` may be called by several threads, for lines of different tiles of 16.
    """

    def __init__(self, lines: int, inputs: int, bits: int, bias: Tensor | None = None) -> None:
        self.data = torch.zeros(-(-lines // LANES) * (inputs // BLOCK) * BLOCK_BYTES[bits], dtype=torch.uint8)
        self.bias = None if bias is None else bias.float().contiguous()
        bias_place = None if self.bias is None else self.bias.data_ptr()
        self.struct = Matrix(bits, lines, inputs, 0, self.data.data_ptr(), bias_place)

    def fill(self, kernels: CpuKernels, lines: Tensor, first: int, kind: int) -> None:
        """Set lines from number `first` on: [lines, bytes] as GGUF's type number `kind` has them, or float32."""
        lines = (lines.float() if kind == FLOATS else lines).contiguous()
        shape = self.struct.bits, self.struct.inputs, kind
        line_bytes = lines.stride(0) * lines.element_size()
        kernels.library.pack(self.data.data_ptr(), *shape, lines.data_ptr(), first, len(lines), line_bytes)

    def expanded(self) -> Tensor:
        """The numbers [lines, inputs] float32: what a product is with, but for its activations' rounding."""
        bits, lines, inputs = self.struct.bits, self.struct.lines, self.struct.inputs
        blocks = self.data.view(-1, inputs // BLOCK, BLOCK_BYTES[bits])  # [tiles, blocks, bytes]
        scales = blocks[..., :32].view(torch.float16).float()  # [tiles, blocks, 16]
        numbers = blocks[..., 64 if bits == 4 else 32 :]
        numbers = numbers.reshape(*blocks.shape[:2], -1, LANES, 4)  # [tiles, blocks, groups, 16, 4]
        least = blocks[..., 32:64].view(torch.float16).float() if bits == 4 else -128 * scales
        if bits == 4:
            numbers = torch.cat((numbers & 15, numbers >> 4), dim=2)
        numbers = numbers.transpose(2, 3).flatten(3).float()  # [tiles, blocks, 16, 32]
        numbers = numbers * scales.unsqueeze(3) + least.unsqueeze(3)
        return numbers.transpose(1, 2).reshape(-1, inputs)[:lines]


def reference_linear(matrix: PackedMatrix, x: Tensor) -> Tensor:
    """The twin of `CpuKernels.linear`: x [rows, inputs] in bytes by blocks of 32, times the expanded matrix."""
    blocks = x.view(len(x), -1, BLOCK)
    scales = blocks.abs().amax(2, keepdim=True) / 127
    rounded = (blocks / scales.clamp_min(1e-30)).round() * scales
    product = rounded.flatten(1).double() @ matrix.expanded().double().T
    return (product if matrix.bias is None else product + matrix.bias).float()
