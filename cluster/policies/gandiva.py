"""Gandiva: affinity, over-subscription in turns, and moves (Xiao et al., OSDI 2018, section 4.2).

Nodes take jobs of one size while that can be (Algorithm 1). Where no GPU is free, jobs are put on
GPUs of their affinity beside others, and take turns or are packed, whichever is measured to be
faster: the local coordinator undoes a packing that does not pay. When GPUs are vacated, jobs that
share move there, then jobs that are spread over more nodes than they need, and nodes that are
almost empty are emptied. Jobs of a lower class never take turns with those of a higher one.

Jobs that declare that they can (`JobSpec.adaptive`) grow into idle GPUs of their server when nobody
has come for a while, and shrink as soon as somebody waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

from waterflow.cluster.free import Placer
from waterflow.cluster.policies.base import Policy
from waterflow.cluster.quotas import Account, Allowance
from waterflow.cluster.state import NOTHING, ClusterState, JobState, Plan

IDLE = 60.0  # seconds without a new job after which jobs grow
MOVES = 8  # at one decision
_EMPTY = 0.75  # a node with so much of its GPUs free is emptied (3 of 4 in the paper)


@dataclass
class _Draft:
    placer: Placer
    allowance: Allowance
    start: dict[int, tuple[int, ...]] = field(default_factory=dict)
    move: dict[int, tuple[int, ...]] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)  # GPUs given to somebody by this plan
    candidates: dict[tuple[int, bool], list[int]] = field(default_factory=dict)


class Gandiva(Policy):
    """Everybody runs at once, in turns if need be; placement is bettered all the time."""

    name = "gandiva"
    source = "Gandiva, section 4.2 (Algorithm 1)"
    summary = "early feedback: jobs share GPUs in turns or packed, and move to better places"
    shares = True
    knows_opportunistic = True
    turns_on_servers = True
    resizes = True

    def level(self, job: JobState) -> int:
        """Opportunistic jobs have a queue of their own, after all others."""
        return int(job.opportunistic)

    def decide(self, state: ClusterState) -> Plan:
        """Place those that wait; if nobody does, better the places of those that run."""
        draft = _Draft(state.placer(), state.allowance())
        quiet_since = state.memory if isinstance(state.memory, float) else 0.0
        wake = inf
        if state.waiting:
            _shrink(state, draft)
            self._start(state, draft)
            quiet_since = state.now
        elif state.free:
            _unshare(state, draft)
            _bring_together(state, draft)
            _defragment(state, draft)
            if not draft.move:
                wake = _grow(state, draft, quiet_since + IDLE)
        if not draft.start and not draft.move and wake == inf and not state.waiting:
            return NOTHING
        # Whoever still waits may share with those that start now: asked again at once.
        if draft.start and state.waiting > len(draft.start):
            wake = state.now
        return Plan(start=draft.start, move=draft.move, wake=wake, memory=quiet_since)

    def _start(self, state: ClusterState, draft: _Draft) -> None:
        affinity = _Affinity(state)
        for level in range(state.levels):
            walk = state.pending(level).walk(draft.allowance)
            while head := walk.best(state.cluster.gpus):
                job = state.jobs[head.job]
                gpus = _free_place(state, draft, affinity, job) or _beside(
                    state, draft, affinity, job
                )
                if gpus is None:
                    walk.drop()
                    continue
                walk.take()
                draft.start[head.job] = gpus
                draft.taken.update(gpus)
                for node in {state.cluster.owner[gpu] for gpu in gpus}:
                    affinity.note(node, job.spec.gpus)


def _shrink(state: ClusterState, draft: _Draft) -> None:
    """Jobs that have grown give back what those that wait need: GPUs, or quota of their tenant."""
    need = sum(state.pending(level).gpus for level in range(state.levels)) - draft.placer.total
    short = _short_of_quota(state, draft) if state.cluster.quotas else Counter()
    for job in state.all_running() if state.grown() and (need > 0 or short) else ():
        extra, account = len(job.gpus) - job.spec.gpus, state.account(job)
        back = min(extra, max(need, short[account]))
        if back > 0:
            size = len(job.gpus) - back
            draft.placer.give(job.gpus[size:], state.cluster.owner)
            draft.move[job.spec.index] = job.gpus[:size]
            draft.allowance.take(account, -back)
            need -= back
            short[account] -= back


def _short_of_quota(state: ClusterState, draft: _Draft) -> Counter[Account]:
    """GPUs that tenants' waiting jobs ask for beyond what their quotas leave."""
    asked: Counter[Account] = Counter()
    for level in range(state.levels):
        for (account, gpus), count in state.pending(level).sizes().items():
            asked[account] += gpus * count if account is not None else 0
    return +Counter({one: n - draft.allowance.left(one, n) for one, n in asked.items()})


def _grow(state: ClusterState, draft: _Draft, after: float) -> float:
    """Idle GPUs go to adaptive jobs of their server, one by one to who gains most.

    Returns when to ask again, if it is too early.
    """
    able = {
        job.spec.index: list(job.gpus)
        for job in state.all_running()
        if job.spec.adaptive and state.nodes_of(job.gpus) == 1
    }
    if not able:
        return inf
    if state.now < after:
        return after
    owner, time = state.cluster.owner, state.speeds.step_time

    def gain(index: int) -> float:
        spec, size = state.jobs[index].spec, len(able[index])
        account = state.account(state.jobs[index])
        room = draft.placer.count(owner[able[index][0]]) and draft.allowance.left(account, 1)
        return time(spec, size, 1) / time(spec, size + 1, 1) - 1 if room else 0.0

    while True:
        best = max(able, key=lambda index: (gain(index), -index))
        if gain(best) <= 0:
            break
        able[best] += draft.placer.take_from(owner[able[best][0]], 1)
        draft.allowance.take(state.account(state.jobs[best]), 1)
        draft.move[best] = tuple(sorted(able[best]))
    return inf


class _Affinity:
    """The size of the jobs on each node that is in use: that of the smallest; 0 where none is."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._noted: dict[int, int] = {}

    def of(self, node: int) -> int:
        """A node's."""
        noted = self._noted.get(node)
        return self._state.smallest(node) if noted is None else noted

    def note(self, node: int, size: int) -> None:
        """A job comes to a node, which takes its affinity if it had none."""
        self._noted[node] = self.of(node) or size


class _Others(Collection[int]):
    """The nodes in use that are not of a size's affinity."""

    def __init__(self, affinity: _Affinity, size: int, nodes: int) -> None:
        self._affinity, self._size, self._nodes = affinity, size, nodes

    def __contains__(self, node: object) -> bool:
        return isinstance(node, int) and self._affinity.of(node) not in (0, self._size)

    def __iter__(self) -> Iterator[int]:
        return (node for node in range(self._nodes) if node in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _free_place(
    state: ClusterState, draft: _Draft, affinity: _Affinity, job: JobState
) -> tuple[int, ...] | None:
    """Lines 5 to 10: the same affinity, empty nodes, then anywhere."""
    need = job.spec.gpus
    if need > draft.placer.total:
        return None
    nodes = len(state.cluster.nodes)
    node = draft.placer.best_fit(need, _Others(affinity, need, nodes))
    if node is not None:
        return draft.placer.take_from(node, need)
    return draft.placer.place(need)


def _beside(
    state: ClusterState, draft: _Draft, affinity: _Affinity, job: JobState
) -> tuple[int, ...] | None:
    """Lines 11 to 14: over-subscription, on the least loaded GPUs of the same affinity."""
    kind = (job.spec.gpus, job.opportunistic)
    if kind not in draft.candidates:
        draft.candidates[kind] = _candidates(state, affinity, *kind)
    pool = draft.candidates[kind]  # the least loaded last
    found: list[int] = []
    passed: list[int] = []
    while pool and len(found) < job.spec.gpus:
        gpu = pool.pop()
        if gpu not in draft.taken:
            (found if _has_memory(state, gpu, job) else passed).append(gpu)
    pool.extend(reversed(passed))
    if len(found) < job.spec.gpus:
        pool.extend(reversed(found))
        return None
    return tuple(sorted(found))


def _candidates(
    state: ClusterState, affinity: _Affinity, size: int, opportunistic: bool
) -> list[int]:
    """GPUs of an affinity that one more job of a class can share, the least loaded last."""
    owner, jobs = state.cluster.owner, state.jobs
    nodes: dict[int, bool] = {}
    found = []
    for gpu in state.shareable():
        node = owner[gpu]
        if node not in nodes:
            nodes[node] = affinity.of(node) == size and node not in state.down
        if nodes[node]:
            there = state.occupants(gpu)
            if all(jobs[index].opportunistic == opportunistic for index in there):
                found.append((len(there), gpu))
    return [gpu for _, gpu in sorted(found, reverse=True)]


def _has_memory(state: ClusterState, gpu: int, job: JobState) -> bool:
    cluster = state.cluster
    used = sum(state.jobs[index].spec.floor for index in state.occupants(gpu))
    return used + job.spec.floor <= cluster.nodes[cluster.owner[gpu]].memory


def _unshare(state: ClusterState, draft: _Draft) -> None:
    """Move jobs that share to GPUs of their own."""
    sharing = {index for gpu in state.crowded() for index in state.occupants(gpu)}
    alone: set[int] = set()
    for job in sorted((state.jobs[i] for i in sharing), key=lambda j: (j.level, j.spec.index)):
        if len(draft.move) >= MOVES:
            return
        if job.spec.index in alone or job.spec.gpus > draft.placer.total:
            continue
        gpus = draft.placer.place(job.spec.gpus)
        if gpus is None:
            return
        draft.move[job.spec.index] = gpus
        draft.taken.update(gpus)
        # Those that it leaves behind need not move, too.
        alone.update(i for gpu in job.gpus for i in state.occupants(gpu))


def _bring_together(state: ClusterState, draft: _Draft) -> None:
    """Migration for locality: jobs on more nodes than they need, if there is a better place."""
    for job in (state.jobs[index] for index in state.spread()):
        if len(draft.move) >= MOVES or not draft.placer.total:
            return
        if job.spec.index in draft.move:
            continue
        gpus = draft.placer.place(len(job.gpus), together=True)
        if gpus is not None:
            draft.move[job.spec.index] = gpus


def _defragment(state: ClusterState, draft: _Draft) -> None:
    """Empty the emptiest node that is in use, onto nodes that are fuller, if it is almost empty."""
    if draft.move or state.waiting:
        return
    cluster = state.cluster
    best: tuple[float, int] | None = None
    for node, spec in enumerate(cluster.nodes):
        share = draft.placer.count(node) / spec.gpus
        if _EMPTY <= share < 1 and node not in state.down:
            best = max(best or (share, -node), (share, -node))
    if best is None:
        return
    node = -best[1]
    empty = {n for n, spec in enumerate(cluster.nodes) if draft.placer.count(n) == spec.gpus}
    for index in sorted({i for g in _gpus(cluster.firsts, node) for i in state.occupants(g)}):
        job = state.jobs[index]
        target = draft.placer.best_fit(len(job.gpus), {node, *empty})
        if target is None or state.nodes_of(job.gpus) > 1:
            continue
        draft.move[index] = draft.placer.take_from(target, len(job.gpus))
        return


def _gpus(firsts: Sequence[int], node: int) -> range:
    return range(firsts[node], firsts[node + 1])
