"""How ranks find one another. The network between hosts must be private: nothing here asks who connects."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from tokenmill.errors import ConfigError, RankLost
from tokenmill.parallel.group import Group

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands, and where it meets the others: at `rendezvous` (host and port), or on this host alone.

    Ranks of one host share `directory`. Timeouts are in seconds: until all are there, and within a collective.
    """

    rank: int
    size: int
    directory: Path
    rendezvous: tuple[str, int] | None
    start_timeout: float
    collective_timeout: float

    @property
    def own_host(self) -> str:
        """This host's address, as seen by the others.

        Raises:
            ConfigError: the rendezvous has none.
        """
        if self.rendezvous is None:
            return LOOPBACK
        try:
            kind, _, _, _, where = socket.getaddrinfo(*self.rendezvous, type=socket.SOCK_DGRAM)[0]
            with socket.socket(kind, socket.SOCK_DGRAM) as probe:  # connecting sends nothing, but chooses a way
                probe.connect(where)
                return str(probe.getsockname()[0])
        except OSError as error:
            host, _ = self.rendezvous
            raise ConfigError(f"--rendezvous: {host} cannot be reached from here: {error.strerror}") from None


def connect(place: Place, device: Literal["cpu", "cuda"], while_waiting: Callable[[], None] = lambda: None) -> Group:
    """The group of all ranks, once every one has come; tensors travel by NCCL on CUDA, by gloo on CPUs.

    On CUDA the caller's current device is the rank's.

    Raises:
        ConfigError: the rendezvous cannot be used.
        RankLost: a rank did not come in time, or cannot be reached.
    """
    store = _meet(place)
    own_host, limit = place.own_host, timedelta(seconds=place.collective_timeout)

    def gloo(name: str) -> Any:
        kind: Any = dist.ProcessGroupGloo
        options = kind._Options()
        options._devices = [kind.create_device(hostname=own_host)]
        options._timeout = limit
        return kind(PrefixStore(name, store), place.rank, place.size, options)

    try:
        control = gloo("control")
        data = gloo("data") if device == "cpu" else _nccl(store, place, limit)
    except RuntimeError as error:
        raise RankLost(f"rank {place.rank} cannot connect to the others: {error}") from None
    group = Group(
        place.rank,
        place.size,
        data,
        control,
        store,
        patience=place.start_timeout,
        while_waiting=while_waiting,
    )
    group.all_reduce(torch.ones(1, device=device))  # opens the links, which a CUDA graph could not
    return group


def _meet(place: Place) -> Any:
    timeout = timedelta(seconds=place.start_timeout)
    try:
        if place.rendezvous is not None:
            host, port = place.rendezvous
            return TCPStore(host, port, None, place.rank == 0, timeout, wait_for_workers=False)
        # The port is the system's choice, so that it never is another server's; a file tells it.
        note = FileStore(str(place.directory / "meeting"), place.size)
        note.set_timeout(timeout)
        if place.rank == 0:
            store = TCPStore(LOOPBACK, 0, None, True, timeout, wait_for_workers=False)
            note.set("port", str(store.port))
            return store
        return TCPStore(LOOPBACK, int(note.get("port")), None, False, timeout, wait_for_workers=False)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        where = "{}:{}".format(*place.rendezvous) if place.rendezvous else LOOPBACK
        raise ConfigError(f"rank {place.rank} cannot meet the others at {where}: {reason}") from None


def _nccl(store: Any, place: Place, limit: timedelta) -> Any:
    kind: Any = dist.ProcessGroupNCCL
    options = kind.Options()
    options._timeout = limit
    return kind(PrefixStore("data", store), place.rank, place.size, options)
