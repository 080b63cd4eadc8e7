"""Builds a job's steps for batches of one signature: captures, compiles and profiles them."""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from waterflow.account.purity import undisturbed
from waterflow.capture.assumptions import Assumptions, JobStructure, Seen
from waterflow.capture.caller import CallerContext
from waterflow.capture.forward import ForwardTrace, trace_forward
from waterflow.capture.graph_file import Traces
from waterflow.capture.join import join
from waterflow.capture.optimizer import OptimizerTrace
from waterflow.capture.own_step import trace_own_step
from waterflow.capture.side_effects import TraceWatch
from waterflow.capture.tracing import capture_error, users_line
from waterflow.executor.data.staging import BatchPrefetcher
from waterflow.executor.run.rng import JobRng
from waterflow.executor.run.tape import compile_step
from waterflow.job.batch import FlatBatch
from waterflow.job.job import Job
from waterflow.job.optimizer_state import NotCapturableError, hyperparameters, state_layout
from waterflow.partitioner.graph.effects import draws_on_host
from waterflow.partitioner.graph.variation import is_chosen_by_clock
from waterflow.steps.capture_cache import CaptureCache, KeptCapture
from waterflow.steps.opacity import Opacity
from waterflow.steps.persistent import PersistentTensors
from waterflow.steps.prepared import PreparedStep, Specialization
from waterflow.steps.shared_captures import (
    MOST_LOOKS,
    Key,
    Offer,
    SharedCapture,
    SharedCaptures,
    SharedStep,
    first_sight,
)
from waterflow.steps.spilling import StepSpiller
from waterflow.steps.step_profiler import StepProfiler
from waterflow.steps.tiers import Tiers
from waterflow.steps.trials import Trials

_Traces = tuple[OptimizerTrace | None, OptimizerTrace | None]
"""Of the optimizer: the first step (None where its state exists), and later ones (None: eager)."""

_Look = tuple[Seen | None, frozenset[str] | None, bool]
"""What counts of a job: what its steps have executed, names, and whether its optimizer does."""


@dataclass(frozen=True)
class _Found:
    """Another job's capture that serves this one, and what it then takes for granted."""

    capture: SharedCapture
    steps: list[SharedStep]
    assumptions: Assumptions
    known: JobStructure


@dataclass
class StepBuilder:
    """Builds one job's steps.

    Attributes:
        job: the job.
        rng: its random streams; never advanced here.
        caller: the context of the thread that submitted the job.
        captures: of the jobs beside it.
        opacity: where an optimizer is given up that cannot be captured.
        trials: whether a step may be traced yet.
        persistent: what the job holds between steps.
        profiler: what the steps allocate.
        spiller: plans the steps into the job's limit.
        prefetcher: brings batches to the device, None where they are there already.
        tiers: whether and when it is captured, None where it is before its first step.
        draws: whether a step that was built draws random numbers on the host.
        seconds: what all that was built has taken, without waits for jobs that look alike.
        shared_with: the job whose capture the latest is; None where it is its own.
        keeps_captures: whether captures are kept between processes.
        disk: those that are.
    """

    job: Job
    rng: JobRng
    caller: CallerContext
    captures: SharedCaptures
    opacity: Opacity
    trials: Trials
    persistent: PersistentTensors
    profiler: StepProfiler
    spiller: StepSpiller
    prefetcher: BatchPrefetcher | None = None
    tiers: Tiers | None = None
    draws: bool = False
    seconds: float = 0.0
    shared_with: str | None = None
    keeps_captures: bool = False
    disk: CaptureCache = field(init=False)
    _taken: dict[_Look, tuple[Assumptions, JobStructure | None]] = field(
        default_factory=dict, init=False
    )

    def __post_init__(self) -> None:
        self.disk = CaptureCache(self.job, self.keeps_captures)

    def runs_to_pay(self, signature: Hashable) -> float:
        """How many steps on such batches save what a capture takes; 0.0 where that is not known, or
        nobody asks."""
        return 0.0 if self.tiers is None else self.tiers.runs_to_pay(signature)

    def build(self, flat: FlatBatch) -> Specialization:
        """The step for such batches, as the user's Python is now: another job's, or captured.

        Raises:
            TrialNeeded: an eager step has to come first, under observation.
            CaptureError, or whatever the user's code raises: it cannot be captured exactly.
        """
        specialization = self._built(flat)
        with self._timed():
            self.spiller.fit(specialization, flat)
        return specialization

    def _built(self, flat: FlatBatch) -> Specialization:
        sight = first_sight(self.job, flat)
        with self._timed():
            found = self._fitting(sight, flat)
        if found is None:
            with self.captures.turn(sight), self._timed():
                found = self._fitting(sight, flat)  # one that looks alike may just have captured it
                if found is None:
                    return self._captured(flat, sight)
        with self._timed():
            return self._shared(found)

    def is_shared(self, flat: FlatBatch) -> bool:
        """Whether a capture for such batches would cost next to nothing, as another job has it."""
        return self._find(first_sight(self.job, flat), flat) is not None

    def renew(self, specialization: Specialization, flat: FlatBatch) -> None:
        """Captures the optimizer's step again, for the hyperparameters as they are now."""
        specialization.assumptions.renew()
        with TraceWatch(self.job, self.rng, self.caller, self.trials.seen) as watch:
            if self.job.step is None:
                traces = self._optimizer_traces(specialization.forward, watch)
            else:
                specialization.forward, traces, _ = self._traced(flat, watch)
                if not set(specialization.forward.recording.answers) <= set(flat.answers):
                    raise capture_error(
                        self.job.name,
                        "the step asks for other values of its batch than before",
                        users_line(None, self.job.function),
                    )
        self._add_steps(specialization, flat, traces)
        self.spiller.fit(specialization, flat)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """Inside, the capture is made or found, and nothing else waited for. What that makes stays,
        and is no garbage."""
        began = time.perf_counter()
        try:
            with undisturbed():
                yield
        finally:
            self.seconds += time.perf_counter() - began

    def note_checked(self, specialization: Specialization) -> None:
        """A check has shown what a step really reads: others need not agree in more."""
        self.disk.note_checked(specialization)
        if specialization.offer is not None:
            is_last = specialization.checked.issuperset(specialization.steps)
            offer = specialization.offer
            narrow = offer.note(self.job, specialization, is_last)
            if narrow is not None:
                self.captures.replace(offer.capture, narrow)
            specialization.offer = None if is_last else offer

    def note_wrong(self, specialization: Specialization) -> None:
        """A check has shown that the step is not the eager one, or changes what it reads."""
        self.disk.note_wrong(specialization)
        if specialization.offer is not None:
            if specialization.offer.capture is not None:
                self.captures.withdraw(specialization.offer.capture)
            specialization.offer = None

    # Another job's

    def _find(self, sight: Hashable, flat: FlatBatch) -> _Found | None:
        """Another job's capture that serves this one and its batch; None where there is none."""
        self._taken = {
            look: (taken, known) for look, (taken, known) in self._taken.items() if taken.hold()
        }
        # Those first that know the optimizer, too: the others serve whatever optimizer there is.
        captures = sorted(self.captures.known(sight), key=lambda one: bool(one.opaque_optimizer))
        fitting = (one for one in captures if flat.gives(one.forward.recording.answers))
        return next(filter(None, map(self._serving, fitting)), None)

    def _serving(self, capture: SharedCapture) -> _Found | None:
        optimizer = self.job.optimizer
        steps = capture.for_state(state_layout(optimizer), hyperparameters(optimizer))
        if steps is None:
            return None
        look = capture.key.seen, capture.key.names, capture.opaque_optimizer is None
        if look not in self._taken:
            if len(self._taken) >= MOST_LOOKS:
                return None
            self._taken[look] = self._look(*look)
        assumptions, known = self._taken[look]
        if known is None or known.key != capture.key.known.key:
            return None
        return _Found(capture, steps, assumptions, known)

    def _look(
        self, seen: Seen | None, names: frozenset[str] | None, with_optimizer: bool
    ) -> tuple[Assumptions, JobStructure | None]:
        assumptions = Assumptions(
            self.job, self.caller, with_optimizer=with_optimizer, seen=seen, names=names
        )
        return assumptions, assumptions.structure()

    def _fitting(self, sight: Hashable, flat: FlatBatch) -> _Found | None:
        """The same, unless it runs the optimizer as eager Python and this job's can be captured:
        what another's does, which had no part in the capture, does not tell."""
        found = self._find(sight, flat)
        if found is None or found.capture.opaque_optimizer is None:
            return found
        if self.opacity.optimizer is None:
            forward = found.capture.forward_of(found.known.structure.tensors)
            with self._watched(flat.signature) as watch:
                self._optimizer_traces(forward, watch)
        return None if self.opacity.optimizer is None else found

    def _shared(self, found: _Found) -> Specialization:
        capture, tensors = found.capture, found.known.structure.tensors
        specialization = Specialization(capture.forward_of(tensors), found.assumptions)
        steps = [self._equipped(step.prepared(self.job, tensors)) for step in found.steps]
        self._put(specialization, steps)
        self.captures.note_use(capture)
        self._taken.clear()
        self.shared_with = capture.owner
        return specialization

    # Its own

    @contextlib.contextmanager
    def _watched(self, signature: Hashable) -> Iterator[TraceWatch]:
        """Inside, the user's code may be traced for such batches."""
        self.trials.demand(signature)
        patience = self._patience(signature) if self.trials.may_precede(signature) else None
        watch = TraceWatch(self.job, self.rng, self.caller, self.trials.seen, patience)
        try:
            with watch:
                self.trials.demand_for(signature, watch.assumptions)
                yield watch
        finally:
            if watch.left:
                self.opacity.note(
                    f"{watch.left[0]} was changed by a trace and could not be put back: the job is "
                    "that change ahead of its loop. Give it capture=False"
                )

    def _patience(self, signature: Hashable) -> float:
        """Seconds that a look may take: steps that need a trial are no better captured then."""
        return math.inf if self.tiers is None else self.tiers.longest_look(signature)

    def _captured(self, flat: FlatBatch, sight: Hashable) -> Specialization:
        try:
            return self._captured_anew(flat, sight)
        except Exception:
            if not self.disk.gives_up():
                raise
        return self._captured_anew(flat, sight)  # what had been kept is gone

    def _captured_anew(self, flat: FlatBatch, sight: Hashable) -> Specialization:
        seen = self.trials.seen
        with self._watched(flat.signature) as watch:
            # To offer it: a check tells more, and nobody asks before.
            waits = self.tiers is not None and self.tiers.is_alone
            forward, traces, kept = self._traced(flat, watch)
            known = None if waits else self._structure(watch, kept)
            assumptions = watch.assumptions
            if self.opacity.optimizer is not None:
                assumptions = Assumptions(self.job, self.caller, with_optimizer=False, seen=seen)
                known = None if waits else assumptions.structure()
            # What a step does to its batch, others' data may yield again.
            may_share = not (watch.touched_streams or forward.changes_batch)
        specialization = Specialization(forward, assumptions)
        self._add_steps(specialization, flat, traces)
        may_keep = may_share and not forward.recording.answers  # no file tells what is asked
        self.disk.note(specialization, kept if may_keep else None)
        self._taken.clear()
        self.shared_with = None
        if may_share:
            why = self.opacity.optimizer_reason
            offer = Offer(sight, why, copy.copy(assumptions))
            if known is not None:
                key = Key.of(assumptions, known)
                offer.capture = offer.made(self.job, specialization, key, known)
            if offer.capture is not None:
                self.captures.add(offer.capture)
            if waits or offer.capture is not None:
                specialization.offer = offer
        return specialization

    @staticmethod
    def _structure(watch: TraceWatch, kept: KeptCapture | None) -> JobStructure | None:
        """Of what the traces take for granted, as it was before them."""
        return watch.assumptions.structure() if kept is None else kept.key.known

    def _traced(
        self, flat: FlatBatch, watch: TraceWatch
    ) -> tuple[ForwardTrace, _Traces, KeptCapture | None]:
        """The step's traces, and their place on disk, if they have one."""
        if self.job.step is not None:
            whole, live = trace_own_step(self.job, flat, self.persistent.tensors, watch)
            return whole, (None, live), None
        made: list[tuple[ForwardTrace, _Traces]] = []

        def trace() -> Traces | None:
            forward = trace_forward(self.job, flat, watch)
            first, steady = self._optimizer_traces(forward, watch)
            made.append((forward, (first, steady)))
            return None if steady is None else Traces(forward, first, steady)

        found, kept = self.disk.traced(flat, watch.assumptions, trace)
        if found is None:
            return *made[0], None
        return found.forward, (found.first, found.steady), kept

    def _optimizer_traces(self, forward: ForwardTrace, watch: TraceWatch) -> _Traces:
        if self.opacity.optimizer is not None:
            return None, None
        try:
            return self.captures.traces.of(self.job, forward, watch)
        except NotCapturableError as error:
            met = isinstance(error.__cause__, Exception)  # perhaps a bug of the optimizer's own
            name = type(self.job.optimizer).__name__
            why = (
                f"{name} cannot be captured exactly ({error}), and a captured pass before it would "
                "run while no other job's step does"
            )
            if not met and self._stays_whole(why):
                where = users_line(None, self.job.function)
                raise capture_error(self.job.name, why, where) from error
            self.opacity.give_up_optimizer(str(error), proved=not met)
            return None, None

    def _stays_whole(self, why: str) -> bool:
        """Whether steps whose optimizer is eager Python, for this reason, are that as a whole: on
        the host, in room of their own beside other jobs' steps. A captured pass before it would
        have the lanes to itself (two jobs of an MLP with RAdam took 1.7 to 1.9 times as long so);
        but it can be planned into a limit, and on a device saves what the host takes."""
        if self.tiers is None or not self.tiers.is_free:
            return False
        if self.spiller.limit is not None or self.spiller.device.queues:
            return False
        self.tiers.note_stays_eager(why)
        return True

    def _add_steps(self, specialization: Specialization, flat: FlatBatch, traces: _Traces) -> None:
        first, steady = traces
        steps: list[PreparedStep] = []
        for trace in (first, steady) if first is not None else (steady,):
            graph = join(self.job, specialization.forward, trace)
            if any(map(is_chosen_by_clock, graph.nodes)):
                raise capture_error(
                    self.job.name,
                    "torch.backends.cudnn.benchmark is on, so that each thread chooses the kernels "
                    "of its convolutions by the clock, and their bits with them. Switch it off, or "
                    "torch.backends.cudnn.deterministic on",
                    users_line(None, self.job.function),
                )
            steps.append(self._equipped(PreparedStep(graph, compile_step(graph), trace)))
        self.profiler.profile(steps, flat)
        self._put(specialization, steps)

    def _equipped(self, step: PreparedStep) -> PreparedStep:
        step.compiled.device_input = (
            None if self.prefetcher is None else self.prefetcher.device_input
        )
        self.draws = self.draws or any(map(draws_on_host, step.graph.nodes))
        return step

    def _put(self, specialization: Specialization, steps: list[PreparedStep]) -> None:
        specialization.first = steps[0] if len(steps) == 2 else None
        specialization.steady = steps[-1]
        first = steps[0].optimizer if specialization.first is not None else None
        created = [] if first is None else map(first.value_of, first.outputs.values())
        self.persistent.note_size(steps, list(created))
