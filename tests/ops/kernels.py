from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2}
DTYPES = [torch.float32, torch.bfloat16]
GATES = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Memory of which every element must be written."""
    value = float("nan") if dtype.is_floating_point else -7
    return torch.full(shape, value, dtype=dtype, device=DEVICE)


def unaligned(x: torch.Tensor) -> torch.Tensor:
    """The same numbers at an address that no wide load can take."""
    room = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    room[1:] = x.flatten()
    return room[1:].view(x.shape)


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=tolerance, atol=tolerance)
