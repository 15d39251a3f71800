"""What the worker loop asks of an engine."""

from __future__ import annotations

from typing import Protocol

from tokenmill.sched.plan import StepPlan, StepResult


class StepHandle(Protocol):
    """A step that was launched."""

    def wait(self) -> StepResult:
        """Block until the step is done. Raises what the step raised."""


class Engine(Protocol):
    """Computes plans in the order in which they are launched."""

    def launch(self, plan: StepPlan) -> StepHandle:
        """Start a step and return at once; at most two may be out."""

    def prepare(self) -> bool:
        """Use a moment without work for a short piece of what makes later steps faster. False: nothing is left."""

    def close(self) -> None:
        """Finish what was launched and free the device."""
