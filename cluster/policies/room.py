"""Whether jobs fit, before anyone is placed: by count, or node by node as YARN's schedulers do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from waterflow.cluster.state import ClusterState


class Room(ABC):
    """What is left of a cluster while jobs are taken in, best first."""

    left: int  # GPUs

    @abstractmethod
    def take(self, gpus: int) -> bool:
        """Take a job in; False, and nothing taken, if it does not fit."""


class Count(Room):
    """Any free GPUs will do."""

    def __init__(self, state: ClusterState) -> None:
        self.left = state.available

    def take(self, gpus: int) -> bool:
        """See `Room`."""
        if gpus > self.left:
            return False
        self.left -= gpus
        return True


class Yarn(Room):
    """All on one node, the first that has room; larger jobs on whole nodes and one for the rest.

    That is how the simulators of Tiresias and Muri place jobs ("yarn"), on equal nodes.
    """

    def __init__(self, state: ClusterState) -> None:
        nodes = state.cluster.nodes
        self._size = nodes[0].gpus
        self._free = [0 if n in state.down else node.gpus for n, node in enumerate(nodes)]
        self.left = sum(self._free)

    def take(self, gpus: int) -> bool:
        """See `Room`."""
        whole, rest = divmod(gpus, self._size) if gpus > self._size else (0, gpus)
        full = [n for n, free in enumerate(self._free) if free == self._size][:whole]
        if len(full) < whole:
            return False
        last = -1
        if rest:
            last = next((n for n, f in enumerate(self._free) if f >= rest and n not in full), -1)
            if last < 0:
                return False
            self._free[last] -= rest
        for node in full:
            self._free[node] = 0
        self.left -= gpus
        return True


MakeRoom = Callable[[ClusterState], Room]
