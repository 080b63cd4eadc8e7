"""The graphs of a job's steps, captured without a run: what a first step would leave is known by
its layout alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from waterflow.capture.caller import CallerContext
from waterflow.capture.forward import trace_forward
from waterflow.capture.join import join
from waterflow.capture.opaque import why_opaque
from waterflow.capture.optimizer import OptimizerTrace
from waterflow.capture.optimizer_cache import OptimizerTraces
from waterflow.capture.own_step import UnsettledError, trace_own_step
from waterflow.capture.side_effects import TraceWatch
from waterflow.capture.tracing import JobMode
from waterflow.common.errors import RunOnlyError
from waterflow.job.batch import FlatBatch
from waterflow.job.job import Job
from waterflow.job.optimizer_state import Layout, NotCapturableError, StateLayout
from waterflow.partitioner.graph.step_graph import Input, StepGraph
from waterflow.steps.batch_preparer import MOST_UNSETTLED
from waterflow.steps.persistent import parameters_of, persistent_tensors

_RUN_IT = (
    "Run it for one step with waterflow.run and read solo_peak_bytes in the job's report, or leave "
    "it out of the plan."
)


@dataclass(frozen=True, eq=False)
class StudyGraphs:
    """A job's captured steps.

    Attributes:
        first: the step that creates the optimizer's state; None where no captured step does.
        steady: every later one.
        optimizer: the optimizer's part of that.
        held: what the job holds between two such steps, by what it is to them; fake where a step
            is yet to make it.
        created: what the first step makes beside that.
    """

    first: StepGraph | None
    steady: StepGraph
    optimizer: OptimizerTrace
    held: dict[Input, torch.Tensor]
    created: list[torch.Tensor]

    def persistent(self) -> list[torch.Tensor]:
        """All that stays between steps once there have been some, constants included."""
        graphs = [graph for graph in (self.first, self.steady) if graph is not None]
        constants = [constant for graph in graphs for constant in graph.constants]
        return [*self.held.values(), *constants, *self.created]


def capture_steps(job: Job, batch: FlatBatch, traces: OptimizerTraces | None = None) -> StudyGraphs:
    """Captures a job's steps on a batch of this layout; nothing of it changes.

    Args:
        job: a job, real or built without memory.
        batch: one of its batches.
        traces: where to look for its optimizer's traces, and to leave them.

    Raises:
        CaptureError: its step cannot be captured exactly.
        RunOnlyError: its memory is known only by running it.
    """
    reason = job.why_eager or why_opaque(job, CallerContext())
    if reason is not None:
        raise RunOnlyError(
            f"job {job.name!r}: {reason}, so its whole step runs as eager Python and its "
            f"memory is known only by running it. {_RUN_IT}"
        )
    if job.step is not None:
        return _own_steps(job, batch)
    forward = trace_forward(job, batch)
    try:
        first, steady = (traces or OptimizerTraces()).of(job, forward)
    except NotCapturableError as error:
        raise RunOnlyError(
            f"job {job.name!r}: {type(job.optimizer).__name__} cannot be captured exactly "
            f"({error}), so it runs as eager Python and its memory is known only by running it. "
            f"{_RUN_IT}"
        ) from error
    made = [] if first is None else [first.value_of(node) for node in first.outputs.values()]
    return StudyGraphs(
        None if first is None else join(job, forward, first),
        join(job, forward, steady),
        steady,
        persistent_tensors(job),
        made,
    )


def _own_steps(job: Job, batch: FlatBatch) -> StudyGraphs:
    """Of a step of the user's own, whose first ones run as eager Python: they are traced for the
    layouts of the state and of the gradients that they leave."""
    own = persistent_tensors(job)
    held, state = {**own, **_gradients(job)}, None
    for _ in range(MOST_UNSETTLED):
        try:
            return _own_graphs(job, batch, held, state)
        except UnsettledError as error:
            state = error.state
            held = {**own, **_stand_ins(state, error.gradients)}
    return _own_graphs(job, batch, held, state)


def _own_graphs(
    job: Job, batch: FlatBatch, held: dict[Input, torch.Tensor], state: StateLayout | None
) -> StudyGraphs:
    with TraceWatch(job) as watch:
        whole, live = trace_own_step(job, batch, held, watch, state)
    return StudyGraphs(None, join(job, whole, live), live, held, [])


def _gradients(job: Job) -> dict[Input, torch.Tensor]:
    leaves = parameters_of(job).items()
    return {Input("gradient", m.key): p.grad for m, p in leaves if p.grad is not None}


def _stand_ins(state: StateLayout, gradients: Mapping[Input, Layout]) -> dict[Input, torch.Tensor]:
    layouts = dict(gradients)
    for index, entries in enumerate(state):
        for key, value in entries.items():
            if isinstance(value, Layout):
                layouts[Input("state", (index, key))] = value
    with JobMode():
        return {meaning: layout.make() for meaning, layout in layouts.items()}
