"""The two loops. Both give the same tokens; overlap hides the scheduler's time behind the device's."""

from __future__ import annotations

from typing import Protocol

from tokenmill.engine.base import Engine, StepHandle
from tokenmill.sched.plan import StepPlan
from tokenmill.worker.core import Core


class Loop(Protocol):
    """A loop that can be driven a turn at a time, as the offline LLM does."""

    def turn(self) -> bool:
        """Take in messages and compute at most one step; False when the loop must end."""


class SerialLoop:
    """Plan a step, compute it, commit it."""

    def __init__(self, core: Core, engine: Engine) -> None:
        self._core = core
        self._engine = engine

    def turn(self) -> bool:
        """One step from plan to commit."""
        if not self._core.intake():
            return False
        plan = self._core.scheduler.plan()
        if plan is not None:
            self._core.deliver(plan, self._engine.launch(plan).wait())
        return True


class OverlapLoop:
    """Plan and launch step n + 1 while the device computes step n; then commit step n."""

    def __init__(self, core: Core, engine: Engine) -> None:
        self._core = core
        self._engine = engine
        self._flight: tuple[StepPlan, StepHandle] | None = None

    def turn(self) -> bool:
        """Launch the next step, then wait for the one before."""
        if not self._core.intake():
            return False
        plan = self._core.scheduler.plan()
        launched = (plan, self._engine.launch(plan)) if plan is not None else None
        if self._flight is not None:
            plan, handle = self._flight
            self._core.deliver(plan, handle.wait())
        self._flight = launched
        return True


def make_loop(core: Core, engine: Engine) -> Loop:
    """The loop that the configuration asks for."""
    return (OverlapLoop if core.scheduler.config.loop == "overlap" else SerialLoop)(core, engine)
