"""AntMan as Muri's simulator has it, for the comparison with its printed figure alone.

Guaranteed jobs (priority 0), in order of submission, take the first node with room. One that finds
none reserves for good what the emptiest node has, and then waits for that node alone. Opportunistic
jobs take the GPUs with the least assumed utilization, wherever they lie: 0.1 for a guaranteed job,
0.9 for an opportunistic one. Nobody is upgraded, and memory is enough.

Which of equally idle GPUs are taken depends there on what rounding leaves in sums of tenths, 0.09
for a reservation and 0.01 when its job starts, as jobs come and go; so those sums are kept, added
up in the same order. What is reserved is part of a job's rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from waterflow.cluster.pending import Rank
from waterflow.cluster.policies.base import Policy
from waterflow.cluster.state import ClusterState, JobState, Plan

_BUSY = 0.8
_GUARANTEED, _OPPORTUNISTIC = 0.1, 0.9
_AT_START = 0.01  # of the former, added when all GPUs are there


@dataclass(frozen=True)
class _Memory:
    """The sums of each GPU, and what each job has added to which."""

    loads: tuple[float, ...]
    placed: tuple[tuple[int, tuple[int, ...], float], ...]


@dataclass
class _Draft:
    state: ClusterState
    size: int  # GPUs of a node
    free: list[list[int]]  # GPUs without a guaranteed job or reservation, by node
    loads: list[float]
    placed: list[tuple[int, tuple[int, ...], float]]
    reserved: set[int] = field(default_factory=set)
    start: dict[int, tuple[int, ...]] = field(default_factory=dict)
    ranks: dict[int, tuple[int, Rank]] = field(default_factory=dict)


class MuriAntMan(Policy):
    """See above; made by `make_policy("antman", "muri")`."""

    name = "antman"
    source = "simulator of Muri"
    summary = "AntMan, simplified"
    shares = True

    def level(self, job: JobState) -> int:
        """Queue 1 is that of opportunistic jobs."""
        return int(job.opportunistic)

    def rank(self, job: JobState, now: float, turn: int) -> Rank:
        """Submission, number, and then the GPUs that are reserved: none yet."""
        return (job.spec.submit, job.spec.index)

    def decide(self, state: ClusterState) -> Plan:
        """Guaranteed jobs, with reservations, then opportunistic ones."""
        draft = _draft(state)
        for index in state.pending(0):
            if not any(draft.free):
                break
            _guaranteed(draft, state.jobs[index])
        if state.levels > 1 and state.pending(1).count:
            _opportunistic(draft)
        memory = _Memory(tuple(draft.loads), tuple(draft.placed))
        return Plan(start=draft.start, ranks=draft.ranks, memory=memory)


def _draft(state: ClusterState) -> _Draft:
    firsts = state.cluster.firsts
    reserved: set[int] = set()
    for index in state.pending(0):
        reserved.update(map(int, state.jobs[index].rank[2:]))
    free = [
        [gpu for gpu in range(a, b) if not state.claimed(gpu) and gpu not in reserved]
        for a, b in pairwise(firsts)
    ]
    was = state.memory
    loads, placed = [0.0] * state.cluster.gpus, []
    if isinstance(was, _Memory):
        loads = list(was.loads)
        for index, gpus, load in was.placed:
            if index in state.jobs:
                placed.append((index, gpus, load))
                continue
            for gpu in gpus:
                loads[gpu] -= load
    return _Draft(state, state.cluster.nodes[0].gpus, free, loads, placed, reserved)


def _guaranteed(draft: _Draft, job: JobState) -> None:
    had = tuple(map(int, job.rank[2:]))
    need = job.spec.gpus - len(had)
    nodes = _whole(draft, need) if job.spec.gpus > draft.size else []
    rest = need - draft.size * len(nodes)
    found = [gpu for node in nodes for gpu in draft.free[node]]
    if rest < draft.size or job.spec.gpus <= draft.size:
        node = _node_for(draft, job, had, rest, nodes) if rest else None
        found += draft.free[node][:rest] if node is not None else []
    draft.reserved.update(found)
    for node, free in enumerate(draft.free):
        draft.free[node] = [gpu for gpu in free if gpu not in draft.reserved]
    for gpu in found:
        draft.loads[gpu] += _GUARANTEED - _AT_START
    gpus = (*had, *found)
    if len(gpus) == job.spec.gpus:
        draft.start[job.spec.index] = tuple(sorted(gpus))
        draft.reserved.difference_update(gpus)
        draft.placed.append((job.spec.index, gpus, _GUARANTEED))
        for gpu in gpus:
            draft.loads[gpu] += _AT_START
    elif found:
        draft.ranks[job.spec.index] = (0, (*job.rank[:2], *had, *found))


def _whole(draft: _Draft, need: int) -> list[int]:
    return [n for n, free in enumerate(draft.free) if len(free) == draft.size][: need // draft.size]


def _node_for(
    draft: _Draft, job: JobState, had: tuple[int, ...], rest: int, without: list[int]
) -> int | None:
    """The node that a job has begun to reserve, or the first with room, or the emptiest."""
    owner = draft.state.cluster.owner
    part = job.spec.gpus % draft.size if job.spec.gpus > draft.size else job.spec.gpus
    if had and rest < part:
        held = [owner[gpu] for gpu in had]
        begun = [n for n in dict.fromkeys(held) if held.count(n) < draft.size]
        if begun:
            return begun[0]
    nodes = [n for n in range(len(draft.free)) if n not in without and draft.free[n]]
    fitting = next((n for n in nodes if len(draft.free[n]) >= rest), None)
    if fitting is not None or not nodes:
        return fitting
    return max(nodes, key=lambda node: (len(draft.free[node]), -node))


def _opportunistic(draft: _Draft) -> None:
    state = draft.state
    idle = _idle(draft)
    for index in state.pending(1):
        if not idle:
            break
        need = state.jobs[index].spec.gpus
        if len(idle) < need:
            continue
        gpus = tuple(gpu for _, gpu in idle[:need])
        draft.start[index] = tuple(sorted(gpus))
        draft.placed.append((index, gpus, _OPPORTUNISTIC))
        for gpu in gpus:
            draft.loads[gpu] += _OPPORTUNISTIC
        idle = _idle(draft)


def _idle(draft: _Draft) -> list[tuple[float, int]]:
    return sorted((load, gpu) for gpu, load in enumerate(draft.loads) if load < _BUSY)
