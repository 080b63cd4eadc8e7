"""Plans the steps of jobs that rest into smaller limits, while others go on.

To plan a step the first time takes a look at what it uses when, which runs it once on copies. No
job that goes first is to wait for that, so a thread does it, for jobs that are in no step.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from waterflow.engine.context import RunContext
from waterflow.engine.job_run import JobRun


@dataclass(eq=False)
class _Order:
    job: JobRun
    limit: int
    thread: threading.Thread | None = None
    possible: bool = False
    done: bool = False


class Replanning:
    """Of the jobs of one engine; on the engine's thread."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._orders: list[_Order] = []

    @property
    def is_ready(self) -> bool:
        """Whether something was planned that nobody has collected; from any thread."""
        return any(order.done for order in list(self._orders))

    def start(self, job: JobRun, limit: int) -> None:
        """Plans the steps of a job that rests, or has not begun, into a limit."""
        order = _Order(job, limit)
        job.is_replanned = True
        order.thread = threading.Thread(
            target=self._plan, args=(order,), name=f"waterflow-plan-{job.name}", daemon=True
        )
        self._orders.append(order)
        order.thread.start()

    def _plan(self, order: _Order) -> None:
        self._context.lanes.adopt_helper()
        try:
            order.possible = order.job.steps.plan_into(order.limit)
        finally:
            order.done = True
            self._context.wake()

    def collect(self) -> list[tuple[JobRun, int, bool]]:
        """What was planned since: the jobs, their limits, and whether there is such a plan."""
        done = [order for order in self._orders if order.done]
        self._orders = [order for order in self._orders if order not in done]
        for order in done:
            order.job.is_replanned = False
        return [(order.job, order.limit, order.possible) for order in done]

    def finish(self) -> None:
        """Waits until all is planned, before anybody else changes a limit."""
        for order in self._orders:
            assert order.thread is not None
            order.thread.join()
