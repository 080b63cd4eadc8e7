"""All that makes one job's steps, put together: what an engine or a study holds of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from waterflow.capture.caller import CallerContext
from waterflow.executor.data.staging import BatchPrefetcher
from waterflow.executor.device.base import Device
from waterflow.executor.run.rng import JobRng
from waterflow.job.job import Job
from waterflow.steps.batch_preparer import BatchPreparer
from waterflow.steps.opacity import Opacity
from waterflow.steps.persistent import PersistentTensors
from waterflow.steps.shared_captures import SharedCaptures
from waterflow.steps.specializations import Specializations
from waterflow.steps.spilling import TIERS, StepSpiller
from waterflow.steps.step_binder import StepBinder
from waterflow.steps.step_builder import StepBuilder
from waterflow.steps.step_cache import StepCache
from waterflow.steps.step_profiler import StepProfiler
from waterflow.steps.tiers import Tiers
from waterflow.steps.trials import Trials


@dataclass(eq=False)
class JobSteps:
    """One job's steps.

    Attributes:
        job: the job.
        device: where it trains.
        rng: its random streams; never advanced here.
        threads: intra-op threads of the lanes, which a profile depends on.
        captures: shared with the jobs beside it.
        caller: the context of the thread that submitted the job.
        may_try: whether eager steps may come first, to be observed.
        tiers: when its steps are captured; None: before they run first.
        limit: bytes that its steps are planned into; None: any.
        spill_to: where values are spilled to: one of `spilling.TIERS`.
        keeps_captures: whether captures are read from disk, and kept there. What is read is to be
            compared with an eager step before it trains.
        prefetcher: brings its batches to the device, None where they are there already.
        opacity: what of its step is not captured.
        persistent: what it holds between steps.
        trials: what its observed steps have shown.
        binder: gives its steps their tensors.
        spiller: plans its steps into the limit.
        builder: makes its steps, or takes them from a job that has the same.
        cache: which step serves a batch.
        preparer: makes its batches ready to run.
    """

    job: Job
    device: Device
    rng: JobRng
    threads: int
    captures: SharedCaptures = field(default_factory=SharedCaptures)
    caller: CallerContext = field(default_factory=CallerContext)
    may_try: bool = True
    tiers: Tiers | None = None
    limit: int | None = None
    spill_to: str = TIERS[0]
    keeps_captures: bool = False
    prefetcher: BatchPrefetcher | None = field(init=False, default=None)
    opacity: Opacity = field(init=False)
    persistent: PersistentTensors = field(init=False)
    trials: Trials = field(init=False)
    binder: StepBinder = field(init=False)
    spiller: StepSpiller = field(init=False)
    builder: StepBuilder = field(init=False)
    cache: StepCache = field(init=False)
    preparer: BatchPreparer = field(init=False)

    def __post_init__(self) -> None:
        job, device, rng, caller = self.job, self.device, self.rng, self.caller
        if job.capture is not False and device.device_input() is not None:
            self.prefetcher = BatchPrefetcher(device)
        self.opacity = opacity = Opacity(job)
        specializations = Specializations()
        self.persistent = PersistentTensors(job, device, specializations, self.prefetcher)
        self.trials = Trials(job, caller, opacity, may_try=self.may_try)
        self.binder = StepBinder(job, rng, self.persistent)
        profiler = StepProfiler(device, rng, self.threads, self.binder)
        self.spiller = StepSpiller(
            job.name, device, self.persistent, profiler, self.limit, self.spill_to
        )
        self.builder = builder = StepBuilder(
            job,
            rng,
            caller,
            self.captures,
            opacity,
            self.trials,
            self.persistent,
            profiler,
            self.spiller,
            self.prefetcher,
            self.tiers,
            keeps_captures=self.keeps_captures,
        )
        self.cache = StepCache(job, specializations, self.persistent, builder, opacity, self.trials)
        self.cache.collect_persistent()
        self.preparer = BatchPreparer(
            job,
            device,
            caller,
            self.cache,
            builder,
            self.persistent,
            opacity,
            self.trials,
            self.prefetcher,
            self.tiers,
        )

    def smallest_limit(self) -> int:
        """The smallest limit that is sure to be accepted. Only while it is in no step."""
        with self.cache.still():
            return self.spiller.smallest()

    def plan_into(self, limit: int) -> bool:
        """Plans the steps of a job that is in none into a limit, and leaves them as they were: it
        takes next to nothing from then on. On any thread.

        Args:
            limit: bytes.

        Returns:
            Whether there is such a plan.
        """
        with self.cache.still():
            former, problem = self.spiller.limit, self.spiller.problem
            self.spiller.problem = None
            try:
                self.spiller.set_limit(limit)
                return self.spiller.problem is None
            finally:
                self.spiller.set_limit(former)
                self.spiller.problem = problem
