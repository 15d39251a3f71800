"""Operations by name."""

from __future__ import annotations

import torch

from tokenmill.errors import ConfigError
from tokenmill.ops.api import Ops
from tokenmill.ops.reference import ReferenceOps


def has_pdl(device: torch.device) -> bool:
    """Whether kernels on the device can start before the one before them ends (compute capability 9 and newer)."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


def make_ops(name: str, device: torch.device | None = None) -> Ops:
    """The operations called `name`; "triton" needs a CUDA device.

    Raises:
        ConfigError: there are none of that name.
    """
    if name == "reference":
        return ReferenceOps()
    if name == "triton" and device is not None:
        from tokenmill.ops.triton.ops import TritonOps

        return TritonOps(has_pdl=has_pdl(device))
    raise ConfigError(f"there are no operations called {name!r}; known: reference, triton")
