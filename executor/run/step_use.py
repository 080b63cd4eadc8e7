"""What a compiled step uses when: the values that a spill plan may move."""

from __future__ import annotations

from dataclasses import dataclass

from waterflow.partitioner.graph.step_graph import Input
from waterflow.partitioner.profile import Profile
from waterflow.partitioner.spill import MovableValue


@dataclass(frozen=True, eq=False)
class StepUse:
    """What a step uses when.

    Attributes:
        profile: the run's, without persistent bytes.
        values: what may move.
        inputs: of each persistent value, by its number, the inputs over it.
        lives: of each transient value the slots that hold a tensor over it: the instruction after
            which each one does, the slot, and the instruction after which it does not.
    """

    profile: Profile
    values: list[MovableValue]
    inputs: dict[int, tuple[Input, ...]]
    lives: dict[int, list[tuple[int, int, int]]]

    def slot_before(self, value: int, instruction: int) -> int:
        """A slot that holds a tensor over a transient value just before an instruction."""
        return next(s for start, s, stop in self.lives[value] if start < instruction <= stop)
