"""What a job needs of the arena: exact for captured steps, measured for eager ones."""

from __future__ import annotations

from waterflow.engine.events import NeedsKnown
from waterflow.steps.job_steps import JobSteps
from waterflow.steps.prepared import PreparedStep


class JobNeeds:
    """A job's bytes in the arena, alone."""

    def __init__(self, steps: JobSteps) -> None:
        self._steps = steps
        self.measured_extent = 0  # of eager steps so far, beyond the persistent tensors

    @property
    def persistent_bytes(self) -> int:
        """What it holds between steps once its state is there."""
        return self._steps.persistent.final_bytes

    @property
    def solo_extent(self) -> int:
        """Arena bytes that a step needs beyond the final persistent tensors."""
        extents = [self.measured_extent]
        created = self.persistent_bytes - self._steps.persistent.bytes
        for step in self._relevant_steps():
            extents.append(step.memory.extent - (created if step.creates_state else 0))
        return max(extents)

    @property
    def needed_bytes(self) -> int:
        """The smallest budget under which the job can run alone."""
        return self.persistent_bytes + self.solo_extent

    def known(self, job: str) -> NeedsKnown:
        """What is known by now, for the report."""
        final, now = self.persistent_bytes, self._steps.persistent.bytes
        peaks = [final + self.measured_extent]
        for step in self._relevant_steps():
            base = now if step.creates_state else final
            peaks.append(base + step.memory.profile.transient_peak_bytes)
        return NeedsKnown(job, final, max(peaks))

    def _relevant_steps(self) -> list[PreparedStep]:
        """The steps that may still run: the first one is over once the state exists."""
        exists = self._steps.persistent.state_exists
        return [step for step in self._steps.cache.steps() if not (exists and step.creates_state)]
