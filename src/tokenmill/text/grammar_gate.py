"""Keeps back the jobs whose grammars are being compiled, so that nothing else waits for that."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tokenmill.errors import TokenmillError
from tokenmill.types import StructuredOutputs
from tokenmill.wire.channel import Receiver
from tokenmill.wire.messages import Abort, GenerateJob, TokenizeJob

LOOK_SECONDS = 0.005  # between two looks for other messages while a job is kept back

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Held(Generic[T]):
    message: T
    uids: frozenset[int]
    compiled: Future[Any] | None

    @property
    def is_ready(self) -> bool:
        return self.compiled is None or self.compiled.done()


class GrammarGate(Generic[T]):
    """A pipe's reading end that lets a job pass once its grammar is compiled, and an Abort not before its jobs.

    All other messages pass in their order. A job whose grammar cannot be compiled passes too: its reader finds out.
    """

    def __init__(self, source: Receiver[T], start: Callable[[StructuredOutputs], Future[Any]]) -> None:
        self._source = source
        self._start = start
        self._held: list[_Held[T]] = []

    def receive(self, timeout: float | None = None) -> list[T]:
        """See `Receiver.receive`; a timeout that is not None is of the pipe alone."""
        while True:
            arrived = self._source.receive(0 if self._held else timeout)
            passed: list[T] = []
            blocked: set[int] = set()
            held, self._held = self._held, []
            for entry in [*held, *map(self._enter, arrived)]:
                if entry.is_ready and blocked.isdisjoint(entry.uids):
                    passed.append(entry.message)
                else:
                    blocked |= entry.uids
                    self._held.append(entry)
            if passed or not self._held or timeout is not None:
                return passed
            wait([its.compiled for its in self._held if its.compiled], LOOK_SECONDS, FIRST_COMPLETED)

    def close(self) -> None:
        """Close the pipe; what is kept back is lost."""
        self._source.close()

    def _enter(self, message: T) -> _Held[T]:
        match message:
            case Abort(uids):
                return _Held(message, frozenset(uids), None)
            case GenerateJob():
                uids, wanted = [message.uid], message.params.structured_outputs
            case TokenizeJob():
                uids, wanted = message.uids, message.params.structured_outputs
            case _:
                return _Held(message, frozenset(), None)
        try:
            return _Held(message, frozenset(uids), self._start(wanted) if wanted else None)
        except TokenmillError:
            return _Held(message, frozenset(), None)
