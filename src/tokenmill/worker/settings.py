"""What a scheduler process is started with. Free of heavy imports: the API process builds it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenmill.config import RunConfig


@dataclass(frozen=True)
class SchedulerSettings:
    """Scheduler and engine of one rank: the configuration, the model's files, the run's private directory."""

    run: RunConfig
    model: Path
    directory: Path
    rank: int = 0
    api_workers: int = 1
    start_timeout: float = 120.0
