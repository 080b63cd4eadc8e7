"""Plans a job's captured steps into a memory limit: by their order first, then by spilling."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from waterflow.allocator_ext import _C
from waterflow.common.errors import BudgetError, JobError
from waterflow.common.units import format_bytes
from waterflow.executor.device.base import Device
from waterflow.executor.plan.piled_step import Piles
from waterflow.executor.plan.spilled_step import SpilledStep, spill_all, spill_step
from waterflow.executor.run.step_use import StepUse
from waterflow.executor.run.tape import compile_step
from waterflow.job.batch import FlatBatch
from waterflow.partitioner.graph.early import update_early
from waterflow.partitioner.graph.inplace import add_in_place
from waterflow.partitioner.graph.step_graph import Input
from waterflow.partitioner.spill import CopyCost, LimitTooSmallError
from waterflow.steps.persistent import PersistentTensors
from waterflow.steps.prepared import PreparedStep, Specialization
from waterflow.steps.step_profiler import StepProfiler

TIERS = ("memory", "disk")
"""Where values are spilled to: host memory, or a mapped file."""

#: What copies take to and from a file that is written behind.
_DISK_COST = CopyCost(1e9, 2e9)


def parse_tier(spill: object) -> str:
    """The tier that a user's `spill` names; raises JobError where it names none."""
    if isinstance(spill, bool):
        return TIERS[0]
    if spill not in TIERS:
        raise JobError(f"spill must be True, False, 'memory' or 'disk', got {spill!r}")
    return str(spill)


@dataclass(eq=False)
class Origin:
    """A step before it was planned into a limit.

    Attributes:
        captured: as it was captured.
        flat: a batch for it.
        early: the same with early updates, once that was asked for.
        use: what `early` uses when, once that was asked for.
        planned: the step under each limit so far, and with what was away before.
    """

    captured: PreparedStep
    flat: FlatBatch
    early: PreparedStep | None = None
    use: StepUse | None = None
    planned: dict[tuple[int, frozenset[Input]], PreparedStep] = field(default_factory=dict)


@dataclass(eq=False)
class StepSpiller:
    """Plans the steps of one job into its limit.

    Only while none of its steps is under way, as captures are made.

    Attributes:
        job: the job's name.
        device: where it trains.
        persistent: what the job holds between steps; told what is away.
        profiler: looks at what steps use.
        limit: bytes that the job may need, taking its steps alone; None: any.
        tier: one of `TIERS`.
        folder: where the file lies, if the tier is one; None: where temporary files do.
        problem: why its steps cannot be planned into the limit; None where they can.
        is_lent: whether the limit is for others' sake: a step that knows none breaks it, then.
        origins: of each specialization's steady step.
    """

    job: str
    device: Device
    persistent: PersistentTensors
    profiler: StepProfiler
    limit: int | None = None
    tier: str = TIERS[0]
    folder: str | None = None
    problem: BudgetError | JobError | None = None
    is_lent: bool = False
    origins: dict[Specialization, Origin] = field(default_factory=dict, init=False)
    _away: dict[tuple[Input, ...], int] = field(default_factory=dict)
    _problems: dict[int, LimitTooSmallError | JobError | None] = field(default_factory=dict)
    _known_away: dict[int, frozenset[Input] | None] = field(default_factory=dict)
    _store: Any = None

    @property
    def is_needed(self) -> bool:
        """Whether a step is another than was captured, since that one does not fit."""
        steady = [one.steady for one in self.origins if one.steady is not None]
        return any(step.planned_from is not None for step in steady)

    @property
    def copied_bytes(self) -> int:
        """What a step copies out and back, of all steps the one that copies most."""
        steps = [one.steady for one in self.origins if one.steady is not None]
        return max((step.spill.moved_bytes for step in steps if step.spill is not None), default=0)

    @property
    def may_spill(self) -> bool:
        """Whether there is a step that could be planned into a limit."""
        return bool(self.origins)

    def is_planned(self, limit: int) -> bool:
        """Whether all steps have been planned into this limit before, or need no more."""
        return all(
            self._needs_no_more(origin, limit) or any(known == limit for known, _ in origin.planned)
            for origin in self.origins.values()
        )

    def _needs_no_more(self, origin: Origin, limit: int) -> bool:
        steps = [step for step in (origin.captured, origin.early) if step is not None]
        return self.persistent.full_bytes + min(step.memory.extent for step in steps) <= limit

    def smallest(self) -> int:
        """The smallest limit that is sure to be accepted, gaps between addresses included. The
        first time each step is looked at, on copies."""
        found = [self._smallest(origin, one.first) for one, origin in self.origins.items()]
        return max(found, default=0)

    def _smallest(self, origin: Origin, first: PreparedStep | None) -> int:
        """With nothing that other steps put away, as they may do less of that under more."""
        early, use = self._looked_at(origin, None if self.persistent.state_exists else first)
        full = self.persistent.full_bytes
        lowered = early.compiled.lowered
        return spill_all(lowered, use, full, alignment=self.device.alignment).needs(full)

    def _looked_at(
        self, origin: Origin, first: PreparedStep | None
    ) -> tuple[PreparedStep, StepUse]:
        """The step with early updates, and what it uses when."""
        early = self._early(origin, first)
        if origin.use is None:
            origin.use = self.profiler.observe(early, first, origin.flat)
        return early, origin.use

    def set_limit(self, limit: int | None) -> None:
        """Plans all steps anew, into another limit; what was away returns where there is room.

        The job's tensors are to be accounted for afterwards, and its steps to be bound: they are
        others than before. `problem` says whether the limit is too small.
        """
        self.limit = limit
        self._keep_away({})
        self._fit_all([*self.origins])

    def fit(self, specialization: Specialization, flat: FlatBatch) -> None:
        """Has a specialization's steady step be one that the limit allows.

        The first step stays: it is the eager one, which makes the optimizer's state in ordinary
        memory. Where there is no such plan, `problem` says so, and the step stays as it was.

        Args:
            specialization: whose steps have their memory.
            flat: a batch for them.
        """
        step = specialization.steady
        if step is None or step.optimizer is None:
            return
        known = self.origins.pop(specialization, None)
        captured = step.as_captured
        if known is None or known.captured is not captured:
            known = Origin(captured, flat)
        self.origins[specialization] = known
        if self.limit is not None:
            self._fit_all([specialization])

    def _fit_all(self, changed: Sequence[Specialization]) -> None:
        """Fits these, and whatever does not know yet what others have put away."""
        stale, known = [*changed], {id(one): self._known_away.get(id(one)) for one in self.origins}
        while stale:
            for one in stale:
                self._problems[id(one)] = self._fit(one)
                known[id(one)] = self.persistent.away
            stale = [one for one in self.origins if known[id(one)] != self.persistent.away]
        self._known_away = known
        problems = (self._problems[id(one)] for one in self.origins)
        self.problem = self._worst([one for one in problems if one is not None])

    def _fit(self, specialization: Specialization) -> LimitTooSmallError | JobError | None:
        """Plans one into the limit; returns why it cannot be."""
        origin = self.origins[specialization]
        specialization.steady = origin.captured
        if self.limit is None:
            return None
        try:
            specialization.steady = self.spilled(origin, self.limit, specialization.first)
        except (LimitTooSmallError, JobError) as error:
            return error
        return None

    def _worst(
        self, problems: Sequence[LimitTooSmallError | JobError]
    ) -> BudgetError | JobError | None:
        """What to tell: a limit that is enough for all."""
        others = [one for one in problems if isinstance(one, JobError)]
        if others or not problems:
            return others[0] if others else None
        assert self.limit is not None
        return self._too_small(self.limit, self.smallest())

    def spilled(self, origin: Origin, limit: int, first: PreparedStep | None) -> PreparedStep:
        """A step planned into a limit; itself where it fits. Remembered per limit.

        Args:
            origin: the step.
            limit: bytes.
            first: the step before it, which makes the optimizer's state; None where there is none.

        Raises:
            LimitTooSmallError: there is no such plan.
            JobError: there is no room in the tier.
        """
        if self.persistent.state_exists:
            first = None
        if self._fits(origin.captured, limit):
            return origin.captured
        if self._fits(self._early(origin, first), limit):
            return self._early(origin, first)
        key = limit, self.persistent.away
        early, use = self._looked_at(origin, first)
        used = {meaning for inputs in use.inputs.values() for meaning in inputs}
        unused = {inputs: n for inputs, n in self._away.items() if used.isdisjoint(inputs)}
        if key not in origin.planned:
            held = self.persistent.full_bytes - sum(unused.values())
            plan = spill_step(
                *(early.compiled.lowered, use, held, limit),
                alignment=self.device.alignment,
                required=self.persistent.away,
                cost=_DISK_COST if self.tier == "disk" else CopyCost(*self.device.tier_rates),
            )
            origin.planned[key] = self._prepared(origin, early, plan)
        step = origin.planned[key]
        assert step.spill is not None
        away = {inputs: use.values[value].size for value, inputs in step.spill.away.items()}
        self._keep_away({**unused, **away})
        return step

    def _keep_away(self, sizes: dict[tuple[Input, ...], int]) -> None:
        """Has these values be away between steps, each with its inputs and its bytes."""
        self._away = sizes
        inputs = frozenset(meaning for inputs in sizes for meaning in inputs)
        self.persistent.keep_away(inputs, sum(sizes.values()))

    def _fits(self, step: PreparedStep, limit: int) -> bool:
        """Whether a step fits as it is, which it can only be where nothing is away."""
        return not self.persistent.away and self.persistent.full_bytes + step.memory.extent <= limit

    def _early(self, origin: Origin, first: PreparedStep | None) -> PreparedStep:
        """The step with early updates, or as captured where that needs less."""
        if origin.early is None:
            captured = origin.captured
            graph = update_early(captured.graph)
            if graph is not captured.graph:
                add_in_place(graph.graph, {graph.loss, *graph.outputs.values()}, scaled=True)
            early = PreparedStep(
                graph, compile_step(graph), captured.optimizer, planned_from=captured
            )
            early.compiled.device_input = captured.compiled.device_input
            self.profiler.profile([early] if first is None else [first, early], origin.flat)
            better = early.memory.extent < captured.memory.extent
            origin.early = early if better else captured
        return origin.early

    def _prepared(self, origin: Origin, step: PreparedStep, plan: SpilledStep) -> PreparedStep:
        """A step of its own, with a tape that spills."""
        compiled = compile_step(step.graph, plan.lowered)
        compiled.device_input = step.compiled.device_input
        compiled.away = plan.away
        compiled.tape.set_tier(self._tier(plan.tier_bytes))
        spilled = PreparedStep(
            step.graph, compiled, step.optimizer, planned_from=origin.captured, spill=plan
        )
        spilled.memory = plan.memory.of_job(self.job)
        spilled.piles = Piles(spilled.memory)
        return spilled

    def _tier(self, size: int) -> Any:
        """The tier, at least so large. Steps of a job take turns, so they share it."""
        if self._store is None or self._store.capacity < size:
            try:
                self._store = self._new_tier(size)
            except RuntimeError as error:
                raise JobError(
                    f"job {self.job!r}: {error}. Have it spill to another folder or to memory, or "
                    "give it more memory"
                ) from error
        return self._store

    def _new_tier(self, size: int) -> Any:
        if self.tier == "disk":
            return _C.Tier.file(self.folder or tempfile.gettempdir(), size)
        return self.device.tier(size)

    def _too_small(self, limit: int, smallest: int) -> BudgetError:
        return BudgetError(
            f"job {self.job!r}: its step cannot be planned into {limit} bytes "
            f"({format_bytes(limit)}), even by spilling: what one operator works on takes "
            f"{smallest} bytes ({format_bytes(smallest)}). Give it that much or more, or use a "
            "smaller batch."
        )
