"""Elastic-Tiresias (Amoeba, section 6.3): Tiresias, with two rules that change jobs' sizes.

R1: where more than N jobs would wait, all jobs outside the first queue run on half of their GPUs.
R2: where nobody waits and GPUs are idle, they go one by one to the job that gains most by one more,
(t(p+1) - t(p)) / t(p), with t(p) its throughput on p GPUs.

A plan is made from the sizes that jobs asked for, then R1 and R2 are applied to it, and only the
outcome is carried out: so the rules never undo each other in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace

from waterflow.cluster.free import Placer
from waterflow.cluster.policies.tiresias import Tiresias, new_ranks
from waterflow.cluster.state import ClusterState, JobState, Plan

#: Service quanta of the first two queues, GPU seconds (Amoeba, section 6.3).
LIMITS = (1e4, 2e5)
#: The paper does not say N; see docs/cluster.md for a sweep.
MOST_WAITING = 10


@dataclass
class _Draft:
    """Who runs, on how many GPUs, before anyone is placed."""

    room: int
    sizes: dict[int, int] = field(default_factory=dict)
    stops: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)

    def waiting(self, state: ClusterState) -> int:
        return state.waiting - len(self.starts) + len(self.stops)


class ElasticTiresias(Tiresias):
    """Tiresias that shrinks jobs under load and grows them when GPUs are idle."""

    name = "elastic-tiresias"
    source = "Amoeba, section 6.3"
    summary = "Tiresias; jobs shrink where many wait and grow where GPUs are idle"

    def __init__(self, limits: Sequence[float] = LIMITS, most_waiting: int = MOST_WAITING) -> None:
        super().__init__(limits)
        self._most_waiting = most_waiting

    def decide(self, state: ClusterState) -> Plan:
        """Tiresias' plan, then R1 and R2, then places."""
        down = self._moved_down(state)
        draft = self._draft(state, down, halve=False)
        if draft.waiting(state) > self._most_waiting:
            draft = self._draft(state, down, halve=True)
        if draft.room and not draft.waiting(state):
            _grow(state, draft)
        start, move = _place(state, draft)
        ranks = new_ranks(state, down, draft.stops, draft.starts)
        kept = [job.spec.index for job in down if job.spec.index in draft.sizes]
        watch = self._watch(state, [*draft.starts, *kept], ranks)
        return Plan(stop=tuple(draft.stops), start=start, move=move, ranks=ranks, watch=watch)

    def _draft(self, state: ClusterState, down: Sequence[JobState], *, halve: bool) -> _Draft:
        draft = _Draft(state.available)
        moved = {job.spec.index: job.level + 1 for job in down}
        for level in range(max(state.levels, 1 + max(moved.values(), default=0))):
            half = halve and level > 0
            if level < state.levels:
                running = sorted(state.running(level).values(), key=lambda job: job.rank)
                for job in running:
                    if job.spec.index not in moved:
                        _keep_or_stop(draft, job, half)
                self._start_waiting(state, level, draft, half)
            for job in down:
                if job.level + 1 == level:
                    _keep_or_stop(draft, job, half)
        return draft

    def _start_waiting(self, state: ClusterState, level: int, draft: _Draft, half: bool) -> None:
        walk = state.pending(level).walk()
        # Half of an odd number is rounded down.
        while head := walk.best(2 * draft.room + 1 if half and draft.room else draft.room):
            size = _size(head.gpus, half)
            draft.starts.append(head.job)
            draft.sizes[head.job] = size
            draft.room -= size
            walk.next()


def _size(gpus: int, half: bool) -> int:
    return max(1, gpus // 2) if half else gpus


def _keep_or_stop(draft: _Draft, job: JobState, half: bool) -> None:
    size = _size(job.spec.gpus, half)
    if size <= draft.room:
        draft.sizes[job.spec.index] = size
        draft.room -= size
    else:
        draft.stops.append(job.spec.index)


def _grow(state: ClusterState, draft: _Draft) -> None:
    """R2."""
    heap = [(-_gain(state, index, size), index) for index, size in draft.sizes.items()]
    heapify(heap)
    while draft.room and heap:
        loss, index = heap[0]
        if loss >= 0:
            break
        draft.sizes[index] += 1
        draft.room -= 1
        heapreplace(heap, (-_gain(state, index, draft.sizes[index]), index))
    while heap:
        heappop(heap)


def _gain(state: ClusterState, index: int, size: int) -> float:
    spec = state.jobs[index].spec
    return state.speeds.step_time(spec, size, 1) / state.speeds.step_time(spec, size + 1, 1) - 1


def _place(
    state: ClusterState, draft: _Draft
) -> tuple[dict[int, tuple[int, ...]], dict[int, tuple[int, ...]]]:
    """Starts and moves. A job that shrinks keeps its first GPUs, one that grows keeps all."""
    placer, owner = state.placer(), state.cluster.owner
    move: dict[int, tuple[int, ...]] = {}
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


def _found(placer: Placer, count: int) -> tuple[int, ...]:
    gpus = placer.place(count)
    if gpus is None:
        raise AssertionError(f"{count} GPUs fit by count and were not found")
    return gpus
