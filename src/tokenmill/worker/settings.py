"""What a scheduler process is started with. Free of heavy imports: the API process builds it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenmill.config import LogLevel, RunConfig
from tokenmill.parallel.place import ranks_here
from tokenmill.procs import ProcessPlan


@dataclass(frozen=True)
class SchedulerSettings:
    """Scheduler and engine of one rank: the configuration, the model's files, the run's private directory.

    Without `has_bounds`, requests are refused neither for the tokens in the queue nor for their deadlines.
    """

    run: RunConfig
    model: Path
    directory: Path
    rank: int = 0
    api_workers: int = 1
    start_timeout: float = 120.0
    has_bounds: bool = True


def plan_ranks(
    run: RunConfig,
    model: Path,
    directory: Path,
    start_timeout: float,
    log_level: LogLevel = "info",
    api_workers: int = 1,
    *,
    has_bounds: bool = True,
) -> list[ProcessPlan]:
    """The scheduler processes of this host, in the order of their ranks."""
    return [
        ProcessPlan(
            f"scheduler-{rank}",
            "tokenmill.worker.main:run_scheduler",
            SchedulerSettings(run, model, directory, rank, api_workers, start_timeout, has_bounds),
            log_level,
        )
        for rank in ranks_here(run.engine)
    ]
