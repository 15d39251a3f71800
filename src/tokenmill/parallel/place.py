"""Where ranks are: on this host, or on several. Free of torch."""

from __future__ import annotations

from tokenmill.config import EngineConfig, check_range
from tokenmill.errors import ConfigError


def ranks_here(engine: EngineConfig) -> range:
    """The ranks of this host."""
    share = engine.tp // engine.nnodes
    return range(engine.node_rank * share, (engine.node_rank + 1) * share)


def meeting_place(engine: EngineConfig) -> tuple[str, int] | None:
    """Host and port of the rendezvous; None: all ranks are on this host.

    Raises:
        ConfigError: the flags that say where ranks are cannot work.
    """
    for flag, value in (("--tp", engine.tp), ("--nnodes", engine.nnodes)):
        check_range(flag, value, 1, 1024)
    check_range("--node-rank", engine.node_rank, 0, engine.nnodes - 1)
    for flag, seconds in (("--rank-timeout", engine.rank_timeout), ("--collective-timeout", engine.collective_timeout)):
        check_range(flag, seconds, 0.1)
    if engine.tp % engine.nnodes:
        raise ConfigError(f"--tp {engine.tp} cannot be spread evenly over --nnodes {engine.nnodes}: choose a multiple")
    if (engine.nnodes > 1) != (engine.rendezvous is not None):
        raise ConfigError("--nnodes over 1 and --rendezvous HOST:PORT need one another: give both, or neither")
    if engine.rendezvous is None:
        return None
    host, _, port = engine.rendezvous.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"--rendezvous must be HOST:PORT, not {engine.rendezvous!r}")
    return host.strip("[]"), int(port)
