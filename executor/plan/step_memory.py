"""What one step does to memory, in the form in which the extension takes it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from waterflow.allocator_ext import _C
from waterflow.partitioner.groups import NodeGroup
from waterflow.partitioner.profile import Profile


class StepMemory:
    """A profile in the form that the rehearsal and the memory plans need."""

    def __init__(self, profile: Profile, alignment: int) -> None:
        self.profile = profile
        self._alignment = alignment
        events = profile.events
        self._bytes = np.ascontiguousarray(events["bytes"], dtype=np.int64)
        self._ids = np.ascontiguousarray(events["id"], dtype=np.int32)
        self._nodes = events["node"]
        self._solo: list[Any] = []  # found when it is asked for, for all jobs with this step

    def of_job(self, name: str) -> StepMemory:
        """The same memory, of the same step of another job."""
        twin = copy.copy(self)
        twin.profile = self.profile.beside(name=name)
        return twin

    @property
    def events(self) -> tuple[Any, Any]:
        """Bytes and block numbers of the step's events."""
        return self._bytes, self._ids

    def arrays(self, groups: Sequence[NodeGroup]) -> tuple[Any, Any, Any]:
        """The step's events cut into groups, as the rehearsal takes them."""
        stops = np.array([group.stop for group in groups])
        ends = np.searchsorted(self._nodes, stops, side="left").astype(np.int32)
        return self._bytes, self._ids, ends

    def memory_plan(self, offsets: Any, version: int) -> Any:
        """The extension's memory plan of the step.

        Args:
            offsets: a place per request.
            version: the arena's, when these places were found.
        """
        step = (self._bytes, self._ids, np.empty(0, np.int32))
        nodes = np.ascontiguousarray(self._nodes, dtype=np.int32)
        return _C.MemoryPlan(step, nodes, self.profile.num_nodes, offsets.tolist(), version)

    @property
    def extent(self) -> int:
        """Bytes of arena that the step needs above the persistent tensors, gaps included."""
        return int(self._rehearsed().extent)

    @property
    def solo_offsets(self) -> Any:
        """A place per request, of the step run alone from address 0."""
        return self._rehearsed().offsets[0]

    def _rehearsed(self) -> Any:
        if not self._solo:
            whole = [NodeGroup(0, self.profile.num_nodes, 0, 0, 0.0)]
            state = _C.Allocator(1 << 60, self._alignment, 1)
            self._solo.append(_C.rehearse(state, [self.arrays(whole)], [0], [[(0, 0, 0)]]))
        return self._solo[0]
