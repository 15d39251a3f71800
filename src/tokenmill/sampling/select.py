"""The sampler that goes with the operations."""

from __future__ import annotations

from tokenmill.ops.api import Ops
from tokenmill.sampling.base import ReferenceSampler, Sampler
from tokenmill.sampling.batch import SamplingTable
from tokenmill.spec import ModelSpec


def make_sampler(table: SamplingTable, spec: ModelSpec, max_rows: int, ops: Ops) -> Sampler:
    """Plain torch beside the reference operations, kernels beside kernels."""
    if ops.name == "reference":
        return ReferenceSampler(table)
    from tokenmill.sampling.triton import TritonSampler

    return TritonSampler(table, spec.vocab_size, max_rows, pdl=ops.has_pdl)
