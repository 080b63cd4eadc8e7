"""Plans that change jobs' sizes: who runs on how many GPUs first, and then where."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapify, heapreplace

from waterflow.cluster.free import Placer
from waterflow.cluster.pending import Rank, Walk
from waterflow.cluster.spec import JobSpec
from waterflow.cluster.state import ClusterState, JobState, Speeds

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
    """Give what is idle, one by one, to the job that gains most by one more GPU."""
    gains: dict[tuple[str, int, int, int], float] = {}

    def gain(index: int) -> float:
        spec, size = state.jobs[index].spec, draft.sizes[index]
        kind = (spec.model, spec.batch, spec.gpus, size)
        if kind not in gains:
            gains[kind] = _gain(state.speeds, spec, size)
        return gains[kind]

    heap = [(-gain(index), index) for index in draft.sizes]
    heapify(heap)
    while draft.room and heap and heap[0][0] < 0:
        index = heap[0][1]
        draft.sizes[index] += 1
        draft.room -= 1
        heapreplace(heap, (-gain(index), index))


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


def _gain(speeds: Speeds, spec: JobSpec, size: int) -> float:
    return speeds.step_time(spec, size, 1) / speeds.step_time(spec, size + 1, 1) - 1


def _found(placer: Placer, count: int) -> tuple[int, ...]:
    gpus = placer.place(count)
    if gpus is None:
        raise AssertionError(f"{count} GPUs fit by count and were not found")
    return gpus
