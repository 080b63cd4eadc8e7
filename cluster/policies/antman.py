"""AntMan: guaranteed jobs by quota, opportunistic ones on what they leave (Xiao et al., OSDI 2020).

Tenants have queues and quotas. Guaranteed jobs start in the order of their tenant's queue, within
its quota, on GPUs without another guaranteed job, together as well as can be; one that does not
fit reserves what is there. Opportunistic jobs go to the GPUs that are busy least, below 80 % in
the last ten seconds (Algorithm 1); reserved GPUs are open to them. A guaranteed job that would wait
runs as opportunistic, keeps its place in the queue, and is upgraded when its turn comes: where it
runs, or, if others have a claim there, elsewhere.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import inf

from waterflow.cluster.free import Placer
from waterflow.cluster.pending import Rank
from waterflow.cluster.policies.base import Policy
from waterflow.cluster.quotas import Allowance
from waterflow.cluster.state import ClusterState, JobState, Plan

BUSY = 0.8  # of the time; a GPU above is left alone
WINDOW = 10.0  # seconds over which that is measured; who came within them counts as busy
PATIENCE = 60.0  # seconds that a guaranteed job waits before it runs as opportunistic
_OPPORTUNISTIC, _MEANWHILE = 1, 2  # queues; the latter: guaranteed jobs that run as opportunistic


@dataclass
class _Draft:
    placer: Placer
    allowance: Allowance
    start: dict[int, tuple[int, ...]] = field(default_factory=dict)
    move: dict[int, tuple[int, ...]] = field(default_factory=dict)
    opportunistic: dict[int, bool] = field(default_factory=dict)
    stop: set[int] = field(default_factory=set)  # opportunistic jobs in the way of guaranteed ones
    leaves: set[int] = field(default_factory=set)  # those that move
    claimed: set[int] = field(default_factory=set)
    memory: dict[int, int] = field(default_factory=dict)
    count: Counter[int] = field(default_factory=Counter)
    wake: float = inf


class AntMan(Policy):
    """Quotas for guaranteed jobs, idle cycles for opportunistic ones."""

    name = "antman"
    source = "AntMan, section 3.3 (Algorithm 1)"
    summary = "quotas; opportunistic jobs in the gaps of guaranteed ones, upgraded when they can be"
    shares = True
    knows_opportunistic = True

    def __init__(self, patience: float = PATIENCE) -> None:
        self._patience = patience

    def level(self, job: JobState) -> int:
        """Queue 1 is that of opportunistic jobs."""
        return 0 if job.spec.guaranteed else _OPPORTUNISTIC

    def level_after_stop(self, job: JobState) -> int:
        """A guaranteed job keeps its place in its queue."""
        return self.level(job)

    def decide(self, state: ClusterState) -> Plan:
        """Guaranteed jobs and upgrades, then opportunistic jobs."""
        draft = _Draft(state.placer(over_opportunistic=True), state.allowance())
        self._start_guaranteed(state, draft)
        self._start_opportunistic(state, draft)
        return Plan(
            stop=tuple(sorted(draft.stop)),
            start=draft.start,
            move=draft.move,
            opportunistic=draft.opportunistic,
            ranks=self._ranks(state, draft),
            wake=draft.wake,
        )

    def _ranks(self, state: ClusterState, draft: _Draft) -> dict[int, tuple[int, Rank]]:
        ranks = {i: (self.level(state.jobs[i]), state.jobs[i].rank) for i in draft.stop}
        for index, opportunistic in draft.opportunistic.items():
            job = state.jobs[index]
            if job.spec.guaranteed:
                ranks[index] = (_MEANWHILE if opportunistic else 0, job.rank)
        return ranks

    def _start_guaranteed(self, state: ClusterState, draft: _Draft) -> None:
        """In order of the queue, also those that run as opportunistic meanwhile."""
        if not draft.placer.total:
            return
        walk = state.pending(0).walk(draft.allowance)
        running = state.running(_MEANWHILE).values() if state.levels > _MEANWHILE else ()
        meanwhile = sorted(running, key=lambda job: job.rank, reverse=True)
        while draft.placer.total:
            head = walk.first()
            if meanwhile and (head is None or meanwhile[-1].rank < head.rank):
                job = meanwhile.pop()
                if job.spec.index in draft.stop:
                    continue
            elif head is not None:
                job = state.jobs[head.job]
                walk.next()
            else:
                break
            account = state.account(job, opportunistic=False)
            if not draft.allowance.fits(account, job.spec.gpus):
                # First come, first served: nobody of a tenant passes one who waits for quota.
                draft.allowance.close(account)
            elif not self._start_or_upgrade(state, draft, job):
                _reserve(draft, job)

    def _start_or_upgrade(self, state: ClusterState, draft: _Draft, job: JobState) -> bool:
        """Job upgrade: where it runs, if nobody has a claim there; else it moves."""
        if job.running and not any(state.claimed(g) or g in draft.claimed for g in job.gpus):
            for gpu in job.gpus:
                self._make_room(state, draft, gpu, job)
            draft.placer.take(job.gpus, state.cluster.owner)
            draft.claimed.update(job.gpus)
            draft.allowance.take(state.account(job, opportunistic=False), len(job.gpus))
            draft.opportunistic[job.spec.index] = False
            return True
        gpus = self._place(state, draft, job)
        if gpus is None:
            return False
        self._take(state, draft, job, gpus, opportunistic=False)
        return True

    def _place(self, state: ClusterState, draft: _Draft, job: JobState) -> tuple[int, ...] | None:
        """GPUs without a guaranteed job, on few nodes; opportunistic jobs there may have to go."""
        gpus = draft.placer.place(job.spec.gpus, together=True)
        if gpus is None:
            return None
        if job.running:
            draft.leaves.add(job.spec.index)
        for gpu in gpus:
            if not _fits(state, draft, gpu, job, opportunistic=False):
                draft.stop.update(_there(state, draft, gpu))
        return gpus

    def _make_room(self, state: ClusterState, draft: _Draft, gpu: int, job: JobState) -> None:
        """Jobs beside one that is upgraded stop where it cannot have all its memory."""
        cluster = state.cluster
        others = [i for i in _there(state, draft, gpu) if i != job.spec.index]
        used = sum(state.jobs[i].spec.floor for i in others) + draft.memory.get(gpu, 0)
        if others and used + job.spec.memory > cluster.nodes[cluster.owner[gpu]].memory:
            draft.stop.update(others)

    def _start_opportunistic(self, state: ClusterState, draft: _Draft) -> None:
        """Opportunistic jobs, then guaranteed ones that have waited for long."""
        gpus: list[int] | None = None
        for level in (_OPPORTUNISTIC, 0):
            walk = state.pending(level).walk() if level < state.levels else None
            while walk is not None and (head := walk.first()):
                job = state.jobs[head.job]
                if head.job in draft.start:
                    walk.next()
                    continue
                expires = job.waits_since + self._patience
                if level == 0 and expires > state.now:
                    draft.wake = min(draft.wake, expires)
                    walk.next()
                    continue
                if gpus is None:
                    gpus = self._by_load(state, draft)
                if self._squeeze_in(state, draft, job, gpus):
                    walk.next()
                else:
                    walk.drop()

    def _by_load(self, state: ClusterState, draft: _Draft) -> list[int]:
        """GPUs that are less busy than the limit, the freest first (`minLoadNodes`).

        Those that somebody came to within the window are busy until it is over: then asked again.
        """
        owner, jobs, now = state.cluster.owner, state.jobs, state.now
        taken = {gpu for places in (draft.start, draft.move) for g in places.values() for gpu in g}
        found: list[int] = []
        recent = now + WINDOW if taken else inf
        for load, gpu in state.by_load():
            if load >= BUSY:
                break
            if owner[gpu] in state.down or gpu in taken:
                continue
            came = max((jobs[i].waits_since for i in state.occupants(gpu)), default=-inf) + WINDOW
            if came > now:
                recent = min(recent, came)
            else:
                found.append(gpu)
        draft.wake = min(draft.wake, recent)
        return found

    def _squeeze_in(
        self, state: ClusterState, draft: _Draft, job: JobState, gpus: list[int]
    ) -> bool:
        """Put a job on the freest GPUs; they are busy from then on."""
        found = []
        for gpu in gpus:
            if _leaves_a_place(state, draft, gpu) and _fits(
                state, draft, gpu, job, opportunistic=True
            ):
                found.append(gpu)
                if len(found) == job.spec.gpus:
                    break
        if len(found) < job.spec.gpus:
            return False
        self._take(state, draft, job, tuple(sorted(found)), opportunistic=True)
        taken = set(found)
        gpus[:] = [gpu for gpu in gpus if gpu not in taken]
        return True

    def _take(
        self,
        state: ClusterState,
        draft: _Draft,
        job: JobState,
        gpus: tuple[int, ...],
        *,
        opportunistic: bool,
    ) -> None:
        (draft.move if job.running else draft.start)[job.spec.index] = gpus
        draft.opportunistic[job.spec.index] = opportunistic
        for gpu in gpus:
            draft.memory[gpu] = draft.memory.get(gpu, 0) + _bytes(job, opportunistic)
            draft.count[gpu] += 1
        if not opportunistic:
            draft.claimed.update(gpus)
            draft.allowance.take(state.account(job, opportunistic=False), len(gpus))


def _reserve(draft: _Draft, job: JobState) -> None:
    """Keep other guaranteed jobs away from what one has found so far (line 8)."""
    placer = draft.placer
    held = placer.take_all() if job.spec.gpus >= placer.total else placer.place(job.spec.gpus)
    draft.claimed.update(held or ())


def _there(state: ClusterState, draft: _Draft, gpu: int) -> list[int]:
    """The jobs that are on a GPU and stay."""
    there = state.occupants(gpu)
    return [i for i in there if i not in draft.stop and i not in draft.leaves]


def _bytes(job: JobState, opportunistic: bool) -> int:
    """What a job has to have: all it asks for with a claim, else as little as can be."""
    return job.spec.floor if opportunistic else job.spec.memory


def _fits(
    state: ClusterState, draft: _Draft, gpu: int, job: JobState, *, opportunistic: bool
) -> bool:
    cluster, there = state.cluster, _there(state, draft, gpu)
    if len(there) + draft.count[gpu] >= cluster.sharing:
        return False
    memory = cluster.nodes[cluster.owner[gpu]].memory
    if not there and not draft.count[gpu]:
        return job.spec.floor <= memory
    used = draft.memory.get(gpu, 0)
    for index in there:
        other = state.jobs[index]  # which may be upgraded just now
        used += _bytes(other, draft.opportunistic.get(index, other.opportunistic))
    return used + _bytes(job, opportunistic) <= memory


def _leaves_a_place(state: ClusterState, draft: _Draft, gpu: int) -> bool:
    """An opportunistic job must not keep a guaranteed one from coming to a GPU, too."""
    if state.claimed(gpu) or gpu in draft.claimed or state.cluster.sharing == 1:
        return True
    return len(_there(state, draft, gpu)) + draft.count[gpu] + 1 < state.cluster.sharing
