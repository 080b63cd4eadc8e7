"""Builds a job's steps for batches of one signature: captures, compiles and profiles them."""

from __future__ import annotations

from dataclasses import dataclass

from waterflow.capture.assumptions import Assumptions
from waterflow.capture.caller import CallerContext
from waterflow.capture.forward import ForwardTrace, trace_forward
from waterflow.capture.join import join
from waterflow.capture.optimizer import OptimizerTrace
from waterflow.capture.optimizer_cache import OptimizerTraces
from waterflow.capture.side_effects import TraceWatch
from waterflow.executor.data.staging import BatchPrefetcher
from waterflow.executor.run.rng import JobRng
from waterflow.executor.run.tape import compile_step
from waterflow.job.batch import FlatBatch
from waterflow.job.job import Job
from waterflow.job.optimizer_state import NotCapturableError
from waterflow.partitioner.graph.effects import draws_on_host
from waterflow.steps.opacity import Opacity
from waterflow.steps.persistent import PersistentTensors
from waterflow.steps.prepared import PreparedStep, Specialization
from waterflow.steps.step_profiler import StepProfiler
from waterflow.steps.trials import Trials

_Traces = tuple[OptimizerTrace | None, OptimizerTrace | None]
"""Of the optimizer: the first step (None where its state exists), and later ones (None: eager)."""


@dataclass
class StepBuilder:
    """Builds one job's steps.

    Attributes:
        job: the job.
        rng: its random streams; never advanced here.
        caller: the context of the thread that submitted the job.
        traces: of optimizers' steps, shared with the jobs beside it.
        opacity: where an optimizer is given up that cannot be captured.
        trials: whether a step may be traced yet.
        persistent: what the job holds between steps.
        profiler: what the steps allocate.
        prefetcher: brings batches to the device, None where they are there already.
        draws: whether a step that was built draws random numbers on the host.
    """

    job: Job
    rng: JobRng
    caller: CallerContext
    traces: OptimizerTraces
    opacity: Opacity
    trials: Trials
    persistent: PersistentTensors
    profiler: StepProfiler
    prefetcher: BatchPrefetcher | None = None
    draws: bool = False

    def build(self, flat: FlatBatch) -> Specialization:
        """Captures the step for such batches, as the user's Python is now.

        Raises:
            TrialNeeded: an eager step has to come first, under observation.
            CaptureError, or whatever the user's code raises: it cannot be captured exactly.
        """
        signature, seen = flat.signature, self.trials.seen
        self.trials.demand(signature)
        may_try = self.trials.may_precede(signature)
        with TraceWatch(self.job, self.rng, self.caller, seen, may_try) as watch:
            self.trials.demand_for(signature, watch.assumptions)
            forward = trace_forward(self.job, flat, watch)
            traces = self._optimizer_traces(forward, watch)
            assumptions = watch.assumptions
            if self.opacity.optimizer is not None:
                assumptions = Assumptions(self.job, self.caller, with_optimizer=False, seen=seen)
        specialization = Specialization(forward, assumptions)
        self._add_steps(specialization, flat, traces)
        return specialization

    def renew(self, specialization: Specialization, flat: FlatBatch) -> None:
        """Captures the optimizer's step again, for the hyperparameters as they are now."""
        with TraceWatch(self.job, self.rng, self.caller, self.trials.seen) as watch:
            traces = self._optimizer_traces(specialization.forward, watch)
        self._add_steps(specialization, flat, traces)

    def _optimizer_traces(self, forward: ForwardTrace, watch: TraceWatch) -> _Traces:
        if self.opacity.optimizer is not None:
            return None, None
        try:
            return self.traces.of(self.job, forward, watch)
        except NotCapturableError as error:
            self.opacity.give_up_optimizer(str(error))
            return None, None

    def _add_steps(self, specialization: Specialization, flat: FlatBatch, traces: _Traces) -> None:
        first, steady = traces
        steps: list[PreparedStep] = []
        for trace in (first, steady) if first is not None else (steady,):
            steps.append(self._compiled(specialization.forward, trace))
        self.profiler.profile(steps, flat)
        specialization.first = steps[0] if len(steps) == 2 else None
        specialization.steady = steps[-1]
        outputs = [] if first is None else first.outputs.values()
        self.persistent.note_size(steps, [node.meta["val"] for node in outputs])

    def _compiled(self, forward: ForwardTrace, trace: OptimizerTrace | None) -> PreparedStep:
        graph = join(self.job, forward, trace)
        step = PreparedStep(graph, compile_step(graph), trace)
        step.compiled.device_input = (
            None if self.prefetcher is None else self.prefetcher.device_input
        )
        self.draws = self.draws or any(map(draws_on_host, graph.nodes))
        return step
