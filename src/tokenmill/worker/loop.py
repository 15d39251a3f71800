"""The two loops. Both give the same tokens; overlap hides the scheduler's time behind the device's."""

from __future__ import annotations

from tokenmill.engine.base import Engine, StepHandle
from tokenmill.sched.plan import StepPlan
from tokenmill.trace import Tracer
from tokenmill.worker.core import Core

Flight = tuple[StepPlan, StepHandle]


class Steps:
    """Steps on their way from plan to commit, for either loop. A `tracer` may be set between two turns."""

    def __init__(self, core: Core, engine: Engine) -> None:
        self.tracer: Tracer | None = None
        self._core = core
        self._engine = engine

    def intake(self) -> bool:
        """Take in messages, or have the engine prepare itself while there are none; False when the loop must end."""
        if self.tracer is not None:
            self.tracer.enter("intake")
        return self._core.intake(self._engine.prepare)

    def launch(self) -> Flight | None:
        """Plan a step and start it; None when there is nothing to compute."""
        if self.tracer is not None:
            self.tracer.enter("plan")
        plan = self._core.plan()
        if plan is None:
            return None
        if self.tracer is not None:
            self.tracer.launch(plan.step, len(plan.rows), plan.num_tokens)
        return plan, self._engine.launch(plan)

    def land(self, flight: Flight) -> None:
        """Wait for a step and commit it."""
        plan, handle = flight
        if self.tracer is not None:
            self.tracer.enter("wait", plan.step)
        result = handle.wait()
        if self.tracer is not None:
            self.tracer.enter("commit", plan.step)
        self._core.deliver(plan, result)
        if self.tracer is not None:
            self.tracer.leave()


class SerialLoop:
    """Plan a step, compute it, commit it."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps

    def turn(self) -> bool:
        """Take in messages and compute one step from plan to commit; False when the loop must end."""
        if not self.steps.intake():
            return False
        launched = self.steps.launch()
        if launched is not None:
            self.steps.land(launched)
        return True


class OverlapLoop:
    """Plan and launch step n + 1 while the device computes step n; then commit step n."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self._flight: Flight | None = None

    def turn(self) -> bool:
        """Take in messages, launch the next step, then wait for the one before; False when the loop must end."""
        if not self.steps.intake():
            return False
        launched = self.steps.launch()
        if self._flight is not None:
            self.steps.land(self._flight)
        self._flight = launched
        return True


def make_loop(core: Core, engine: Engine) -> SerialLoop | OverlapLoop:
    """The loop that the configuration asks for."""
    return (OverlapLoop if core.scheduler.config.loop == "overlap" else SerialLoop)(Steps(core, engine))
