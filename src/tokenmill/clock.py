"""The clock that deadlines are told by: the same in all processes of a machine, and it never goes back."""

from __future__ import annotations

import time


def milliseconds() -> int:
    """Milliseconds since some moment of the past."""
    return time.monotonic_ns() // 1_000_000
