"""What a job needs of the arena: exact for captured steps, measured for eager ones."""

from __future__ import annotations

from waterflow.engine.events import NeedsKnown
from waterflow.executor.plan.need import MemoryNeed
from waterflow.steps.job_steps import JobSteps
from waterflow.steps.prepared import PreparedStep


class JobNeeds:
    """A job's bytes in the arena, alone."""

    def __init__(self, steps: JobSteps) -> None:
        self._steps = steps
        self.measured_extent = 0  # of eager steps so far, beyond the persistent tensors
        self.evaluation_extent = 0  # of evaluations

    @property
    def persistent_bytes(self) -> int:
        """What it holds between steps once its state is there."""
        return self._steps.persistent.final_bytes

    @property
    def memory(self) -> MemoryNeed:
        """What it needs to take any step that it may still take, as far as is known."""
        if self._guess is not None:
            return self._guess
        created = self.persistent_bytes - self._steps.persistent.bytes
        steps = [(s.memory, created if s.creates_state else 0) for s in self._relevant_steps()]
        measured = max(self.measured_extent, self.evaluation_extent)
        return MemoryNeed.of(self.persistent_bytes, steps, measured)

    @property
    def _guess(self) -> MemoryNeed | None:
        """What it may need, where it has taken no step and none is captured."""
        tiers = self._steps.tiers
        if tiers is None or self.measured_extent or self._steps.opacity.step is not None:
            return None
        return None if self._steps.cache.steps() else tiers.guess

    def known(self, job: str) -> NeedsKnown:
        """What is known by now, for the report."""
        final, now = self.persistent_bytes, self._steps.persistent.bytes
        peaks = [final + self.measured_extent, final + self.evaluation_extent]
        for step in self._relevant_steps():
            base = now if step.creates_state else final
            peaks.append(base + step.memory.profile.transient_peak_bytes)
        return NeedsKnown(job, final, max(peaks))

    def _relevant_steps(self) -> list[PreparedStep]:
        """The steps that may still run: the first one is over once the state exists. Under a limit
        it is the eager one, which takes ordinary memory as checks do."""
        exists = self._steps.persistent.state_exists or self._steps.spiller.limit is not None
        return [step for step in self._steps.cache.steps() if not (exists and step.creates_state)]
