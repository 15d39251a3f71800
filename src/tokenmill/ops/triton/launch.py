"""Programmatic dependent launch (CUDA programming guide, chapter of that name).

A kernel launched with `pdl` may start while the kernel before it on the stream still runs. Between its start and
`gdc_wait` it may read only what no kernel since the last ordinary launch writes: weights, and, as a step's embedding is
an ordinary launch, the positions, angles and page table made before it. As every such kernel lets the next one start at
once, "the kernel before" may itself still be waiting; so each of them must wait, also one that reads nothing.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
import triton.language.extra.cuda


def pdl_options(pdl: bool) -> dict[str, Any]:
    """The launch's keyword arguments; the interpreter knows none of them."""
    return {"launch_pdl": True} if pdl else {}


@triton.jit
def start_and_wait(PDL: tl.constexpr):
    """Let the next kernel start, and wait for the one before."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
