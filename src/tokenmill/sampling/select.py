"""The sampler of a device."""

from __future__ import annotations

import torch

from tokenmill.sampling.base import ReferenceSampler, Sampler
from tokenmill.sampling.batch import SamplingTable
from tokenmill.spec import ModelSpec


def make_sampler(table: SamplingTable, spec: ModelSpec, max_rows: int, device: torch.device) -> Sampler:
    """Kernels on a CUDA device, plain torch elsewhere."""
    if device.type != "cuda":
        return ReferenceSampler(table)
    from tokenmill.sampling.triton import TritonSampler

    return TritonSampler(table, spec.vocab_size, max_rows)
