"""A server whose engine computes nothing: it draws words that tell the time, at a given pace."""

from __future__ import annotations

import cProfile
import pstats
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from tokenmill.bench.options import Compared
from tokenmill.bench.simulate import combinations
from tokenmill.clock import milliseconds
from tokenmill.config import ModelConfig, RunConfig, ServerConfig
from tokenmill.errors import ConfigError
from tokenmill.procs import ProcessPlan, Report
from tokenmill.sched.plan import StepPlan, StepResult
from tokenmill.server import launch
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.wire.channel import PullChannel, PushChannel, ServerChannel, address
from tokenmill.wire.messages import ToDetokenizer, ToScheduler
from tokenmill.worker.core import make_core
from tokenmill.worker.inbox import LeaderInbox
from tokenmill.worker.loop import make_loop

NUM_WORDS = 8192
MAX_RUNNING, NUM_PAGES, MAX_MODEL_LEN = 1024, 1 << 16, 1 << 16
PROFILED_LINES = 20
PROFILED = r"tokenmill.(server|wire)|uvicorn.protocols|starlette.(_|middleware)|msgspec|zmq"


@dataclass(frozen=True)
class PacedSettings:
    """The scheduler process's: the model whose words are drawn, and the seconds between steps that draw n rows."""

    model: Path
    directory: Path
    api_workers: int
    rate: float
    stream_rate: float


def words(tokenizer: Tokenizer) -> list[int]:
    """NUM_WORDS ids, each a space and other letters. Raises ConfigError: the vocabulary has fewer."""
    texts = ((token_id, tokenizer.decode([token_id])) for token_id in range(tokenizer.vocab_size))
    found = [its for its, text in texts if text[:1] == " " and text[1:].isascii() and text[1:].isalpha()]
    if len(found) < NUM_WORDS:
        raise ConfigError(f"bench http needs a vocabulary of {NUM_WORDS} words: take the default model")
    return found[:NUM_WORDS]


class PacedEngine:
    """Draws the same word for all rows of a step, number `milliseconds() % NUM_WORDS`, when its time has come."""

    def __init__(self, ids: list[int], rate: float, stream_rate: float) -> None:
        self._ids, self._rate, self._stream_rate = ids, rate, stream_rate
        self._due = 0.0

    def launch(self, plan: StepPlan) -> PacedHandle:
        """The step is due its share of the pace after the one before."""
        rows = sum(row.is_sampled for row in plan.rows)
        pause = max(rows / self._rate, 1 / self._stream_rate)
        self._due = max(self._due, time.monotonic() - 10 * pause) + pause
        return PacedHandle(plan, rows, self._due, self._ids)

    def prepare(self) -> bool:
        """Nothing to prepare."""
        return False

    def close(self) -> None:
        """Nothing to free."""


@dataclass(frozen=True, slots=True)
class PacedHandle:
    """A step that is done at the time `due`, of `time.monotonic`."""

    plan: StepPlan
    rows: int
    due: float
    ids: list[int]

    def wait(self) -> StepResult:
        """Sleep until then."""
        time.sleep(max(0.0, self.due - time.monotonic()))
        return StepResult(self.plan.step, (self.ids[milliseconds() % NUM_WORDS],) * self.rows)


def run_paced(settings: PacedSettings, report: Report) -> None:
    """The scheduler process: the real loop and scheduler, over a PacedEngine."""
    compared = Compared(num_pages=(NUM_PAGES,), max_running=(MAX_RUNNING,), prefill_budget=(8192,))
    config = next(combinations(compared, "cpu"))[1]
    tokenizer = Tokenizer.load(settings.model)
    engine = PacedEngine(words(tokenizer), settings.rate, settings.stream_rate)
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        pipe = PullChannel[ToScheduler](context, address(settings.directory, "scheduler"), ToScheduler)
        inbox = stack.enter_context(closing(LeaderInbox(pipe)))
        detokenizer = PushChannel[ToDetokenizer](context, address(settings.directory, "detokenizer"))
        server = ServerChannel(context, settings.directory, settings.api_workers)
        stack.enter_context(closing(detokenizer))
        stack.enter_context(closing(server))
        loop = make_loop(make_core(config, inbox, detokenizer, server, has_pace=False, has_twin=False), engine)
        report.ready(
            max_model_len=MAX_MODEL_LEN,
            vocab_size=tokenizer.vocab_size,
            max_waiting=config.max_waiting,
            max_waiting_tokens=config.max_waiting_tokens,
            has_priorities=False,
        )
        while loop.turn():
            pass


def profiled(call: Callable[[], Any]) -> None:
    """Call, and tell on stderr where the time went, also if it is ended by SystemExit."""
    profile = cProfile.Profile()
    try:
        profile.runcall(call)
    finally:
        pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(PROFILED, PROFILED_LINES)


def serve(model: str, rate: float, stream_rate: float, api_workers: int = 1, is_profiled: int = 0) -> int:
    """Serve on a free port until a signal."""
    server = ServerConfig(port=0, api_workers=api_workers, served_model_name="paced", shutdown_grace=0)

    def plan(run: RunConfig, server: ServerConfig, path: Path, directory: Path) -> list[ProcessPlan]:
        paced = PacedSettings(path, directory, api_workers, rate, stream_rate)
        plans = launch.plan_processes(run, server, path, directory)
        return [
            ProcessPlan(its.name, "tokenmill.bench.paced:run_paced", paced) if its.name == "scheduler-0" else its
            for its in plans
        ]

    run = RunConfig(ModelConfig(model))
    if is_profiled:
        profiled(lambda: launch.serve(run, server, plan))
        return 0
    return launch.serve(run, server, plan)


if __name__ == "__main__":
    name, *numbers = sys.argv[1:]
    sys.exit(serve(name, float(numbers[0]), float(numbers[1]), int(numbers[2]), int(numbers[3])))
