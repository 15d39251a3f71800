"""A rank's place among the others: its group, its watch, and where its messages come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import zmq

from tokenmill.engine.device import take_device, taken_memory
from tokenmill.parallel.connect import Place, connect
from tokenmill.parallel.group import Group
from tokenmill.parallel.place import meeting_place, ranks_here
from tokenmill.wire.channel import PullChannel, address
from tokenmill.wire.messages import ToScheduler
from tokenmill.worker.inbox import FollowerInbox
from tokenmill.worker.settings import SchedulerSettings
from tokenmill.worker.watch import Watch


def join_group(settings: SchedulerSettings, while_waiting: Callable[[], None] = lambda: None) -> Group:
    """The group of a scheduler process, once all ranks are there; takes the rank's device. See `connect`.

    Raises:
        ConfigError: there are too few devices, or the rendezvous cannot be used.
        RankLost: a rank did not come.
    """
    engine = settings.run.engine
    if engine.tp == 1:
        return Group.solo()
    here = ranks_here(engine)
    return connect(_place(settings), take_device(engine.device, settings.rank - here.start, len(here)), while_waiting)


def _place(settings: SchedulerSettings) -> Place:
    engine = settings.run.engine
    timeouts = settings.start_timeout, engine.collective_timeout
    return Place(settings.rank, engine.tp, settings.directory, meeting_place(engine), *timeouts)


@dataclass(frozen=True, slots=True)
class Ranks:
    """What a rank has beside its engine, if there are others."""

    watch: Watch | None = None
    inbox: FollowerInbox | None = None  # of ranks above 0
    followers: Sequence[str] = ()  # addresses of all such inboxes
    gather: Callable[[str], Sequence[str]] | None = None  # digests, where they are compared

    def count_turn(self) -> None:
        """Tell the others that this rank goes on."""
        if self.watch is not None:
            self.watch.turns += 1

    def facts(self) -> list[tuple[int, int]]:
        """Of each rank, its turns and the memory that it took at its start, in bytes."""
        return [] if self.watch is None else [(life.turns, life.num_bytes) for life in self.watch.lives]

    def wait(self) -> None:
        """After a collective has failed: until the watch, or the parent, has told which rank was lost."""
        if self.watch is not None:
            self.watch.wait()


def open_ranks(
    stack: ExitStack,
    context: zmq.Context[Any],
    settings: SchedulerSettings,
    group: Group,
    lost: Callable[[str], None],
) -> Ranks:
    """What `stack` will close; returns once every rank has loaded its model. `lost`: see `Watch.begin`.

    Raises:
        RankLost: a rank did not come so far.
    """
    if group.size == 1:
        return Ranks()
    engine, rank, host = settings.run.engine, settings.rank, _place(settings).own_host

    def where(name: str) -> str:
        open_host = f"[{host}]" if ":" in host else host
        return address(settings.directory, name) if engine.nnodes == 1 else f"tcp://{open_host}:*"

    limits = {"silence": engine.rank_timeout, "lateness": engine.collective_timeout}
    # An LLM's rank 0 is its caller's process, which may hold the interpreter for long. The others end with it anyway.
    trusted = None if settings.has_bounds else 0
    watch = Watch(context, where(f"beat-{rank}"), rank, group.size, trusted=trusted, **limits)
    stack.enter_context(closing(watch))
    inbox, own = None, ""
    if rank:
        pipe = PullChannel[list[ToScheduler]](context, where(f"rank-{rank}"), list[ToScheduler])
        inbox, own = stack.enter_context(closing(FollowerInbox(pipe))), pipe.address
    watch.num_bytes = taken_memory()
    followers = group.exchange("inbox", own)[1:]
    watch.begin(group.exchange("beat", watch.address), lost)
    return Ranks(watch, inbox, followers, group.all_digests if engine.debug_ranks else None)
