"""Rank 0 in a process of the user's own, with the other ranks as its children."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq

from tokenmill.config import RunConfig
from tokenmill.errors import ConfigError, RankLost, StartFailed
from tokenmill.parallel.group import Group
from tokenmill.parallel.place import meeting_place
from tokenmill.procs import Supervisor, private_directory
from tokenmill.wire.channel import Sender
from tokenmill.wire.messages import GenerateJob, ToScheduler
from tokenmill.worker.inbox import open_followers
from tokenmill.worker.ranks import Ranks, join_group, open_ranks
from tokenmill.worker.settings import plan_ranks

T = TypeVar("T")
START_TIMEOUT = 600.0


class Followers:
    """All ranks but rank 0. With one rank there are none, and nothing is opened."""

    def __init__(self) -> None:
        self.pipes: Sequence[Sender[list[ToScheduler]]] = ()
        self.gather: Callable[[str], Sequence[str]] | None = None
        self._stack = ExitStack()
        self._supervisor = Supervisor(START_TIMEOUT)
        self._ranks = Ranks()
        self._pids: list[int] = []
        self._words = ""

    def start(self, run: RunConfig, model: Path, load: Callable[[Group], T]) -> T:
        """Start the others, and `load` this rank beside them.

        Raises:
            StartFailed: one did not become ready.
            TokenmillError: what `load` raises, or the ranks cannot meet.
        """
        if meeting_place(run.engine) is not None:
            raise ConfigError("an LLM has its ranks on one host: for several, use tokenmill serve")
        if run.engine.tp == 1:
            return load(Group.solo())
        try:
            return self._start(run, model, load)
        except BaseException:
            self.close()
            raise

    def _start(self, run: RunConfig, model: Path, load: Callable[[Group], T]) -> T:
        directory = self._stack.enter_context(private_directory())
        own, *others = plan_ranks(run, model, directory, START_TIMEOUT, has_bounds=False)
        self._stack.callback(self._supervisor.stop, 1.0)
        context: zmq.Context[Any] = self._stack.enter_context(zmq.Context())
        loaded: list[T] = []

        def meanwhile() -> None:
            group = join_group(own.settings, self._check)
            loaded.append(load(group))
            self._ranks = open_ranks(self._stack, context, own.settings, group, self._lose)
            self.gather = self._ranks.gather
            self.pipes = open_followers(context, self._ranks.followers)
            for pipe in self.pipes:
                self._stack.callback(pipe.close)

        self._pids = [its.pid for its in self._supervisor.start(others, meanwhile).values()]
        return loaded[0]

    def as_sent(self, job: GenerateJob) -> GenerateJob:
        """A job as the others read it: a number may be of another type there, such as 0.0 for 0."""
        return msgspec.msgpack.decode(msgspec.msgpack.encode(job), type=GenerateJob) if self.pipes else job

    def count_turn(self) -> None:
        """Tell the others that this rank goes on."""
        self._ranks.count_turn()

    def explain(self, error: RankLost) -> RankLost:
        """The error that names the rank, where it can be known."""
        if self._words:
            return RankLost(self._words)
        ended = self._supervisor.find_ended(timeout=1.0)
        return error if ended is None else RankLost(f"the {ended.name} process has ended: {ended.reason}")

    def close(self) -> None:
        """End the others."""
        self._stack.close()

    def _check(self) -> None:
        if (ended := self._supervisor.find_ended(timeout=0)) is not None:
            raise StartFailed(f"{ended.name} could not start: {ended.reason}")

    def _lose(self, words: str) -> None:
        # By the watch's thread. The main one waits for the lost rank in a collective, which fails when that ends.
        self._words = words
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
