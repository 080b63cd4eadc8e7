"""What jobs need of an arena, and whether that fits: asked by runs and studies alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from waterflow.executor.plan.step_memory import StepMemory


@dataclass(frozen=True)
class MemoryNeed:
    """What a job needs to take a step while no other job takes one.

    Attributes:
        persistent_bytes: held all the time, once all that persists is there.
        step_bytes: bytes of arena that a step needs above them, gaps included.
    """

    persistent_bytes: int
    step_bytes: int

    @classmethod
    def of(
        cls,
        persistent_bytes: int,
        steps: Iterable[tuple[StepMemory, int]],
        measured_bytes: int = 0,
    ) -> MemoryNeed:
        """The need of a job.

        Args:
            persistent_bytes: what it holds at last.
            steps: the steps that it may take, each with the bytes of the persistent ones that it
                makes itself.
            measured_bytes: what steps have needed that are not known by a profile.
        """
        extents = [memory.extent - created for memory, created in steps]
        return cls(persistent_bytes, max([measured_bytes, *extents]))

    @property
    def alone_bytes(self) -> int:
        """The smallest budget under which the job can run by itself."""
        return self.persistent_bytes + self.step_bytes


def fit_in_turn(needs: Sequence[MemoryNeed], memory: int) -> bool:
    """Whether jobs fit at least one step after another, everybody's persistent tensors held.

    Args:
        needs: one per job.
        memory: bytes that all may hold together, in whole units of the arena's alignment.
    """
    return in_turn_bytes(needs) <= memory


def in_turn_bytes(needs: Sequence[MemoryNeed]) -> int:
    """The smallest budget under which jobs fit, one step after another."""
    persistent = sum(need.persistent_bytes for need in needs)
    return persistent + max(need.step_bytes for need in needs)
