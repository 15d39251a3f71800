"""Rotary position embedding: frequencies by kind, and the angles of a step.

The kinds: default (Su et al. 2021), linear (Chen et al. 2023, position interpolation), yarn (Peng et al. 2023),
longrope (Ding et al. 2024) and llama3 (Llama 3.1's reference code); constants and rounding follow transformers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tokenmill.ops.api import Ops, Rotation
from tokenmill.spec import ModelSpec, RopeSpec


class RotaryEmbedding:
    """The rotation angles of positions, all zero without `rope`; nothing is tabulated."""

    def __init__(self, rope: RopeSpec | None, spec: ModelSpec, ops: Ops, device: torch.device) -> None:
        self._ops, self._factor = ops, 1.0 if rope is None else attention_factor(rope)
        still = torch.zeros(spec.head_dim // 2)
        self._frequencies = (still if rope is None else _frequencies_of(rope, spec)).to(device)

    def rotation(self, positions: Tensor) -> Rotation:
        """The angles of positions [tokens]."""
        return self._ops.rotation(positions, self._frequencies, self._factor)


def rope_frequencies(rope: RopeSpec, rotary_dim: int, max_position: int) -> Tensor:
    """Radians a position of each pair of dimensions, [rotary_dim / 2] float32."""
    powers = rope.theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    frequencies = 1.0 / powers
    original = rope.original_max_position or max_position
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        frequencies = _llama3(frequencies, rope, original)
    elif rope.kind == "yarn":
        kept = 1 - _yarn_ramp(rope, rotary_dim, original)  # share of each frequency that is not interpolated
        frequencies = 1.0 / (rope.factor * powers) * (1 - kept) + frequencies * kept
    factors = rope.frequency_factors
    if rope.kind == "longrope" and max_position > original:
        factors = rope.long_factors
    if factors is not None:
        frequencies = frequencies / torch.tensor(factors, dtype=torch.float32)
    return frequencies


def _frequencies_of(rope: RopeSpec, spec: ModelSpec) -> Tensor:
    return rope_frequencies(rope, rope.rotary_dim or spec.head_dim, spec.max_position)


def attention_factor(rope: RopeSpec) -> float:
    """What cosines and sines are multiplied by (1 except for yarn and longrope)."""
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind == "longrope":
        length = rope.original_max_position or 1
        return math.sqrt(1 + math.log(rope.factor) / math.log(length)) if rope.factor > 1 < length else 1.0
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(frequencies: Tensor, rope: RopeSpec, original: int) -> Tensor:
    low, high = rope.low_freq_factor, rope.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    smooth = (original / wavelengths - low) / (high - low)
    between = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / rope.factor, between)
    return torch.where(wavelengths < original / high, frequencies, scaled)


def _yarn_ramp(rope: RopeSpec, rotary_dim: int, original: int) -> Tensor:
    def dimension(rotations: float) -> float:
        return rotary_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    width = high - low if high != low else 0.001
    return ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
