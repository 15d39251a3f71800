"""A channel that ends the loop which reads it."""

from __future__ import annotations

from typing import Any

from tokenmill.wire.channel import MemoryChannel
from tokenmill.wire.messages import Stop


class EndingChannel(MemoryChannel[Any]):
    """Gives Stop to a reader that would wait for ever."""

    def receive(self, timeout: float | None = None) -> list[Any]:
        return super().receive() or ([Stop()] if timeout is None else [])
