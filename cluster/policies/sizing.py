"""Plans that change jobs' sizes: who runs on how many GPUs first, and then where."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace

from waterflow.cluster.free import Placer
from waterflow.cluster.pending import Rank, Walk
from waterflow.cluster.state import ClusterState, JobState

Places = dict[int, tuple[int, ...]]


@dataclass
class Draft:
    """Who runs, on how many GPUs, before anyone is placed."""

    room: int
    sizes: dict[int, int] = field(default_factory=dict)
    stops: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)

    def waiting(self, state: ClusterState) -> int:
        """How many jobs would wait."""
        return state.waiting - len(self.starts) + len(self.stops)


def start_waiting(walk: Walk, draft: Draft, *, half: bool, before: Rank | None = None) -> None:
    """Start, as far as there is room, those that wait and come before a rank."""
    # Half of an odd number is rounded down.
    while head := walk.best(2 * draft.room + 1 if half and draft.room else draft.room):
        if before is not None and head.rank >= before:
            break
        size = _size(head.gpus, half)
        draft.starts.append(head.job)
        draft.sizes[head.job] = size
        draft.room -= size
        walk.next()


def keep_or_stop(draft: Draft, job: JobState, *, half: bool) -> None:
    """A running job goes on, if there is room."""
    size = _size(job.spec.gpus, half)
    if size <= draft.room:
        draft.sizes[job.spec.index] = size
        draft.room -= size
    else:
        draft.stops.append(job.spec.index)


def grow(state: ClusterState, draft: Draft) -> None:
    """Give what is idle, one by one, to the job that gains most by one more GPU.

    Starts from the sizes that jobs have: those that have grown give back only what others need,
    and of them those that lose least, so that few jobs change at one event.
    """
    gain = _Gains(state)
    given = []
    for index in draft.sizes:
        had = len(state.jobs[index].gpus)
        if had > draft.sizes[index]:
            given.append(index)
            draft.room -= had - draft.sizes[index]
    base = {index: draft.sizes[index] for index in given}
    draft.sizes.update({index: len(state.jobs[index].gpus) for index in given})
    least = [(gain(index, draft.sizes[index] - 1), index) for index in given]
    heapify(least)
    while draft.room < 0:
        index = least[0][1]
        draft.sizes[index] -= 1
        draft.room += 1
        if draft.sizes[index] == base[index]:
            heappop(least)
        else:
            heapreplace(least, (gain(index, draft.sizes[index] - 1), index))
    most = [(-gain(index, size), index) for index, size in draft.sizes.items() if draft.room]
    heapify(most)
    while draft.room and most and most[0][0] < 0:
        index = most[0][1]
        draft.sizes[index] += 1
        draft.room -= 1
        heapreplace(most, (-gain(index, draft.sizes[index]), index))


class _Gains:
    """What one more GPU brings, (t(p+1) - t(p)) / t(p); jobs of a kind gain alike."""

    def __init__(self, state: ClusterState) -> None:
        self._jobs, self._speeds = state.jobs, state.speeds
        self._found: dict[tuple[str, int, int, int], float] = {}

    def __call__(self, index: int, size: int) -> float:
        spec = self._jobs[index].spec
        kind = (spec.model, spec.batch, spec.gpus, size)
        found = self._found.get(kind)
        if found is None:
            time = self._speeds.step_time
            found = self._found[kind] = time(spec, size, 1) / time(spec, size + 1, 1) - 1
        return found


def place(state: ClusterState, draft: Draft) -> tuple[Places, Places]:
    """Starts and moves. A job that shrinks keeps its first GPUs, one that grows keeps all."""
    placer, owner = state.placer(), state.cluster.owner
    move: Places = {}
    for index in draft.stops:
        placer.give(state.jobs[index].gpus, owner)
    for index, size in draft.sizes.items():
        gpus = state.jobs[index].gpus
        if len(gpus) > size:
            placer.give(gpus[size:], owner)
            move[index] = gpus[:size]
    start = {index: _found(placer, draft.sizes[index]) for index in draft.starts}
    for index, size in draft.sizes.items():
        gpus = state.jobs[index].gpus
        if 0 < len(gpus) < size:
            move[index] = tuple(sorted((*gpus, *_found(placer, size - len(gpus)))))
    return start, move


def _size(gpus: int, half: bool) -> int:
    return max(1, gpus // 2) if half else gpus


def _found(placer: Placer, count: int) -> tuple[int, ...]:
    gpus = placer.place(count)
    if gpus is None:
        raise AssertionError(f"{count} GPUs fit by count and were not found")
    return gpus
