"""Command-line flags, from the config dataclasses. Apart from `cli`, which child processes load too without tyro."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import tyro

from tokenmill.config import DEFAULT_MODEL, EngineConfig, ModelConfig, RunConfig, SchedulerConfig, ServerConfig

T = TypeVar("T")


@dataclass(frozen=True)
class ModelFlags(ModelConfig):
    """Which model, and in which form."""

    model: tyro.conf.Positional[str] = DEFAULT_MODEL
    """Alias, local folder, local .gguf file, or hub id."""


@dataclass(frozen=True)
class RunFlags:
    """What every command that loads a model takes."""

    model: ModelFlags = field(default_factory=ModelFlags)
    engine: EngineConfig = field(default_factory=EngineConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    @property
    def run(self) -> RunConfig:
        """The flags as a RunConfig, which other processes can unpickle without tyro."""
        return RunConfig(ModelConfig(**dataclasses.asdict(self.model)), self.engine, self.scheduler)


@dataclass(frozen=True)
class ServeFlags(RunFlags):
    """Serve a model over HTTP, with OpenAI's API."""

    server: ServerConfig = field(default_factory=ServerConfig)


@dataclass(frozen=True)
class PullFlags:
    """Fetch a model into the cache, so that later commands start at once."""

    model: tyro.conf.Positional[str] = DEFAULT_MODEL
    """Alias or hub id."""


def parse(kind: type[T], command: str, arguments: Sequence[str]) -> T:
    """The flags of `tokenmill COMMAND`; exits with 2 and a message when they are wrong, with 0 after --help."""
    return tyro.cli(kind, prog=f"tokenmill {command}", args=arguments, config=(tyro.conf.OmitArgPrefixes,))
