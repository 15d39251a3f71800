"""Command-line flags, from the config dataclasses. Apart from `cli`, which child processes load too without tyro."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args

import msgspec
import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from tokenmill.config import (
    DEFAULT_MODEL,
    EngineConfig,
    LogLevel,
    ModelConfig,
    RunConfig,
    SchedulerConfig,
    ServerConfig,
)
from tokenmill.types import SamplingParams

T = TypeVar("T")


@dataclass(frozen=True)
class ModelFlags(ModelConfig):
    """Which model, and in which form."""

    model: tyro.conf.Positional[str] = DEFAULT_MODEL
    """Alias, local folder, local .gguf file, or hub id."""


@dataclass(frozen=True)
class RunFlags:
    """A RunConfig whose model is named without a flag."""

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
class SamplingFlags:
    """How to draw; auto is as the model's files recommend."""

    max_tokens: int | None = None
    """Most tokens to generate; auto is what the context leaves."""
    temperature: float | None = None
    """0 always takes the likeliest token."""
    top_k: int | None = None
    """Keep the k likeliest tokens."""
    top_p: float | None = None
    """Keep the likeliest tokens up to this share of probability."""
    min_p: float | None = None
    """Drop tokens less likely than this share of the likeliest one."""
    seed: int | None = None
    """Makes answers repeatable; auto draws a new one each time."""

    def over(self, defaults: SamplingParams) -> SamplingParams:
        """`defaults` with the flags that were given."""
        return msgspec.structs.replace(defaults, **{k: v for k, v in vars(self).items() if v is not None})


@dataclass(frozen=True)
class ChatFlags(RunFlags):
    """Talk with a model in the terminal."""

    sampling: SamplingFlags = field(default_factory=SamplingFlags)
    system: str | None = None
    """System text; default is the model's own."""


@dataclass(frozen=True)
class GenerateFlags:
    """Continue a text and print what comes."""

    prompt: tyro.conf.Positional[str]
    """The text to continue."""
    run: RunConfig = field(default_factory=RunConfig)
    sampling: SamplingFlags = field(default_factory=SamplingFlags)


@dataclass(frozen=True)
class BatchFlags:
    """Answer a file of requests in OpenAI's batch format; run again, it goes on where it was cut short."""

    input: tyro.conf.Positional[Path]
    """File with a request a line: custom_id, method, url, body."""
    output: tyro.conf.Positional[Path]
    """File that gets an answer a line; what is there already is not asked again."""
    errors: Path | None = None
    """File for answers that are errors; default is the output file."""
    concurrency: int = 256
    """Most requests at a time."""
    tokenizers: int = 1
    """Tokenizer processes."""
    log_level: LogLevel = "warning"
    """Least level of messages on stderr."""
    run: RunConfig = field(default_factory=RunConfig)


@dataclass(frozen=True)
class ModelsFlags:
    """List the models, formats and tokenizers that are supported."""


@dataclass(frozen=True)
class PlanFlags(RunFlags):
    """Tell what serving a model would take; weights are not read. Takes the flags of serve that shape memory."""

    length: int | None = None
    """Tokens of a request, prompt and output; auto shows several."""
    memory: float | None = None
    """GiB that are free on each device; auto is measured."""
    bandwidth: float | None = None
    """GB/s that a device reads; auto is measured by a copy."""


@dataclass(frozen=True)
class PullFlags:
    """Fetch a model into the cache, so that later commands start at once."""

    model: tyro.conf.Positional[str] = DEFAULT_MODEL
    """Alias or hub id."""


def parse(kind: type[T], command: str, arguments: Sequence[str]) -> T:
    """The flags of `tokenmill COMMAND`; exits with 2 and a message when they are wrong, with 0 after --help."""
    registry = ConstructorRegistry()
    registry.primitive_rule(_number_or_auto)
    return tyro.cli(
        kind, prog=f"tokenmill {command}", args=arguments, config=(tyro.conf.OmitArgPrefixes,), registry=registry
    )


def _number_or_auto(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """A number that may be left open is called "auto" then, as in flags that are a choice."""
    kinds = get_args(info.type)
    if kinds not in ((int, NoneType), (float, NoneType)):
        return None
    number: type[int] | type[float] = kinds[0]
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=f"{{auto}}|{number.__name__.upper()}",
        instance_from_str=lambda given: None if given[0] == "auto" else number(given[0]),
        is_instance=lambda value: value is None or isinstance(value, number),
        str_from_instance=lambda value: ["auto" if value is None else str(value)],
    )
