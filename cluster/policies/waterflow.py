"""Ours: what the engine knows of its jobs decides who runs, beside whom, and on how many GPUs.

The engine has measured each job's step and knows its steps, so it knows the GPU seconds to go: the
least go first, guaranteed jobs before all others. Whoever does not fit runs as a guest beside a job
of the same size, where the memory that both can be squeezed to fits and where, by measured pairs,
it keeps at least `LEAST` of its speed; the local coordinator sees to it that its host does not
notice. A guest whose host is gone takes its place. Where many wait, jobs run on half of their GPUs,
and where nobody does, idle GPUs go to those that gain most, as in Elastic-Tiresias: by measured
scaling.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from waterflow.cluster.local.coordinator import OnGpu, limits
from waterflow.cluster.local.memory import coordinated, squeezed
from waterflow.cluster.pending import Rank
from waterflow.cluster.policies.base import Policy
from waterflow.cluster.policies.sizing import (
    Draft,
    grow,
    keep_or_stop,
    place,
    start_waiting,
)
from waterflow.cluster.state import ClusterState, JobState, Plan

MOST_WAITING = 10  # more, and jobs run on half of their GPUs; on small clusters, one in
_GPUS_EACH = 8  # so many GPUs
LEAST = 0.2  # of its speed alone, that a guest must keep
CANDIDATES = 64  # jobs for which a host is sought at one decision
HOSTS = 16  # that are looked at for each of them
_GUESTS = 2  # the queue of those that run as guests


@dataclass
class _Plan:
    draft: Draft
    guests: dict[int, tuple[int, ...]] = field(default_factory=dict)
    owners: list[int] = field(default_factory=list)  # guests that take their host's place


class Waterflow(Policy):
    """Least service to go first; guests by memory and measured pairs; elastic at the margin."""

    name = "waterflow"
    source = "ours"
    summary = "least service to go first, guests where memory and speed allow, elastic sizes"
    shares = True
    resizes = True
    knows_opportunistic = True

    def __init__(self, most_waiting: int = MOST_WAITING, least: float = LEAST) -> None:
        self._most_waiting = most_waiting
        self._least = least

    def level(self, job: JobState) -> int:
        """Guaranteed jobs, then opportunistic ones."""
        return int(not job.spec.guaranteed)

    def level_after_stop(self, job: JobState) -> int:
        """A guest waits among those of its class."""
        return self.level(job)

    def rank(self, job: JobState, now: float, turn: int) -> Rank:
        """GPU seconds to go."""
        return (_to_go(job, now), job.spec.index)

    def decide(self, state: ClusterState) -> Plan:
        """Owners and their sizes, then guests."""
        owners = _without_host(state)
        draft = self._draft(state, owners, halve=False)
        if draft.waiting(state) > min(self._most_waiting, state.available // _GPUS_EACH):
            draft = self._draft(state, owners, halve=True)
        all_run = not draft.waiting(state)
        placed = place(state, draft, keep=all_run)
        if all_run:
            grow(state, draft, placed)
        start, move = placed.start, placed.move
        evicted = self._evicted(state, draft, move)
        plan = _Plan(draft, owners=owners)
        if draft.waiting(state):
            self._find_hosts(state, plan, start, move, evicted)
        return self._finish(state, plan, start, move, evicted)

    def _draft(self, state: ClusterState, owners: list[int], *, halve: bool) -> Draft:
        draft = Draft(state.available, state.allowance(running=False))
        # A guest that takes its host's place has a claim, if it was submitted with one.
        draft.claims.update(i for i in owners if state.jobs[i].spec.guaranteed)
        account = draft.account_in(state)
        now = state.now
        for level in range(min(state.levels, _GUESTS)):
            jobs = [
                *state.running(level).values(),
                *(state.jobs[i] for i in owners if self.level(state.jobs[i]) == level),
            ]
            ranked = sorted(((_to_go(job, now), job.spec.index), job) for job in jobs)
            walk = state.pending(level).walk(draft.allowance)
            for rank, job in ranked:
                start_waiting(walk, draft, half=halve, before=rank)
                keep_or_stop(draft, job, account(job.spec.index), half=halve)
            start_waiting(walk, draft, half=halve)
        return draft

    def _evicted(
        self, state: ClusterState, draft: Draft, move: dict[int, tuple[int, ...]]
    ) -> list[int]:
        """Guests whose host stops, moves or changes its size."""
        if state.levels <= _GUESTS:
            return []
        gone = {*draft.stops, *move}
        return [
            index
            for index, job in state.running(_GUESTS).items()
            if index not in draft.sizes
            and index not in gone
            and any(i in gone for gpu in job.gpus for i in state.occupants(gpu))
        ]

    def _find_hosts(
        self,
        state: ClusterState,
        plan: _Plan,
        start: dict[int, tuple[int, ...]],
        move: dict[int, tuple[int, ...]],
        evicted: list[int],
    ) -> None:
        """The best of those that wait, beside running jobs of the same size that stay."""
        hosts = self._hosts(state, plan.draft, move, evicted)
        if not any(hosts.values()):
            return
        tried = 0
        for level in range(min(state.levels, _GUESTS)):
            walk = state.pending(level).walk()
            while (head := walk.first()) and tried < CANDIDATES:
                walk.next()
                if head.job in start:
                    continue
                tried += 1
                guest = state.jobs[head.job]
                fitting = hosts.get(head.gpus, [])
                found = [(self._speed(state, guest, host), host) for host in fitting[:HOSTS]]
                speed, host = max(found, key=lambda one: one[0], default=(0.0, guest))
                if speed >= self._least:
                    fitting.remove(host)
                    plan.guests[head.job] = host.gpus

    def _hosts(
        self,
        state: ClusterState,
        draft: Draft,
        move: dict[int, tuple[int, ...]],
        evicted: list[int],
    ) -> dict[int, list[JobState]]:
        """Jobs that stay where they are and have no guest, by size, the least busy first."""
        found: dict[int, list[JobState]] = {}
        if state.cluster.sharing < 2:
            return found
        for index in draft.sizes:
            job = state.jobs[index]
            # Where a guest is leaving, the next comes with the next decision.
            if job.gpus and index not in move and len(state.occupants(job.gpus[0])) == 1:
                found.setdefault(len(job.gpus), []).append(job)
        for jobs in found.values():
            jobs.sort(key=lambda job: (job.spec.utilization, job.spec.index))
        return found

    def _speed(self, state: ClusterState, guest: JobState, host: JobState) -> float:
        """A guest's speed beside a host; 0 if their memory does not fit."""
        cluster = state.cluster
        memory = min(cluster.nodes[cluster.owner[gpu]].memory for gpu in host.gpus)
        if guest.spec.floor + host.spec.floor > memory:
            return 0.0
        pair = (OnGpu(host.spec, False), OnGpu(guest.spec, True))
        given = coordinated(pair, memory)
        if squeezed(host.spec, given[0]) < 1.0:
            return 0.0  # the host would notice
        return limits(pair, state.speeds)[1] * squeezed(guest.spec, given[1])

    def _finish(
        self,
        state: ClusterState,
        plan: _Plan,
        start: dict[int, tuple[int, ...]],
        move: dict[int, tuple[int, ...]],
        evicted: list[int],
    ) -> Plan:
        stops = (*plan.draft.stops, *evicted)
        ranks = {i: (_GUESTS, state.jobs[i].rank) for i in plan.guests}
        for index in stops:
            job = state.jobs[index]
            ranks[index] = (self.level(job), self.rank(job, state.now, state.turn))
        kept = [index for index in plan.owners if index not in stops]
        ranks |= {i: (self.level(state.jobs[i]), state.jobs[i].rank) for i in kept}
        classes = {i: not state.jobs[i].spec.guaranteed for i in (*start, *kept)}
        return Plan(
            stop=stops,
            start={**start, **plan.guests},
            move=move,
            opportunistic={**classes, **dict.fromkeys(plan.guests, True)},
            ranks=ranks,
        )


def _to_go(job: JobState, now: float) -> float:
    return job.remaining(now) * job.spec.gpus


def _without_host(state: ClusterState) -> list[int]:
    """Guests that are alone on their GPUs."""
    if state.levels <= _GUESTS:
        return []
    guests = state.running(_GUESTS).items()
    return [i for i, job in guests if all(len(state.occupants(g)) == 1 for g in job.gpus)]
