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
from waterflow.cluster.policies.base import Policy
from waterflow.cluster.state import ClusterState, JobState, Plan

BUSY = 0.8  # of the time; a GPU above is left alone
_MANY = 256  # that have waited too long are looked at
WINDOW = 10.0  # seconds over which that is measured; who came within them counts as busy
PATIENCE = 60.0  # seconds that a guaranteed job waits before it runs as opportunistic


@dataclass
class _Draft:
    placer: Placer
    used: Counter[str]
    start: dict[int, tuple[int, ...]] = field(default_factory=dict)
    move: dict[int, tuple[int, ...]] = field(default_factory=dict)
    opportunistic: dict[int, bool] = field(default_factory=dict)
    stop: set[int] = field(default_factory=set)  # opportunistic jobs in the way of guaranteed ones
    leaves: set[int] = field(default_factory=set)  # those that move
    claimed: set[int] = field(default_factory=set)
    load: dict[int, float] = field(default_factory=dict)
    memory: dict[int, int] = field(default_factory=dict)
    count: Counter[int] = field(default_factory=Counter)
    impatient: list[int] = field(default_factory=list)
    wake: float = inf


class AntMan(Policy):
    """Quotas for guaranteed jobs, idle cycles for opportunistic ones."""

    name = "antman"
    source = "AntMan, section 3.3 (Algorithm 1)"
    summary = "quotas; opportunistic jobs in the gaps of guaranteed ones, upgraded when they can be"
    shares = True

    def __init__(self, patience: float = PATIENCE) -> None:
        self._patience = patience

    def level(self, job: JobState) -> int:
        """Queue 1 is that of opportunistic jobs."""
        return int(not job.spec.guaranteed)

    def decide(self, state: ClusterState) -> Plan:
        """Guaranteed jobs and upgrades, then opportunistic jobs."""
        draft = _Draft(state.placer(over_opportunistic=True), _used(state))
        self._start_guaranteed(state, draft)
        self._start_opportunistic(state, draft)
        return Plan(
            stop=tuple(sorted(draft.stop)),
            start=draft.start,
            move=draft.move,
            opportunistic=draft.opportunistic,
            wake=draft.wake,
        )

    def _start_guaranteed(self, state: ClusterState, draft: _Draft) -> None:
        """In order of the queue, also those that run as opportunistic meanwhile."""
        walk = state.pending(0).walk()
        meanwhile = sorted(
            (job for job in state.running(0).values() if job.opportunistic),
            key=lambda job: job.rank,
            reverse=True,
        )
        blocked: set[str] = set()
        tenants = max(len(state.cluster.quotas), 1)
        while draft.placer.total or (len(blocked) < tenants and len(draft.impatient) < _MANY):
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
            if job.spec.tenant in blocked or not _within_quota(state, draft, job):
                # First come, first served: nobody of a tenant passes one who waits for quota.
                blocked.add(job.spec.tenant)
            elif self._start_or_upgrade(state, draft, job):
                continue
            else:
                _reserve(draft, job)
            if not job.running:
                self._wait(state, draft, job)

    def _start_or_upgrade(self, state: ClusterState, draft: _Draft, job: JobState) -> bool:
        """Job upgrade: where it runs, if nobody has a claim there; else it moves."""
        if job.running and not any(state.claimed(g) or g in draft.claimed for g in job.gpus):
            draft.placer.take(job.gpus, state.cluster.owner)
            draft.claimed.update(job.gpus)
            draft.used[job.spec.tenant] += len(job.gpus)
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
            if not _fits(state, draft, gpu, job):
                draft.stop.update(_there(state, draft, gpu))
        return gpus

    def _wait(self, state: ClusterState, draft: _Draft, job: JobState) -> None:
        expires = job.waits_since + self._patience
        if expires <= state.now:
            draft.impatient.append(job.spec.index)
        else:
            draft.wake = min(draft.wake, expires)

    def _start_opportunistic(self, state: ClusterState, draft: _Draft) -> None:
        level = state.pending(1) if state.levels > 1 else None
        if not draft.impatient and (level is None or not level.count):
            return
        recent = self._measure(state, draft)
        lists = _by_load(state, draft)
        walk = level.walk() if level is not None else None
        failed: set[int] = set()
        while walk is not None and (head := walk.first()):
            if self._squeeze_in(state, draft, state.jobs[head.job], lists):
                walk.next()
            else:
                failed.add(head.gpus)
                walk.drop()
        for index in draft.impatient:
            if state.jobs[index].spec.gpus not in failed and not self._squeeze_in(
                state, draft, state.jobs[index], lists
            ):
                failed.add(state.jobs[index].spec.gpus)
        if recent > state.now and failed:
            draft.wake = min(draft.wake, recent)

    def _measure(self, state: ClusterState, draft: _Draft) -> float:
        """Load and memory of GPUs; when the next GPU that somebody came to is measured again."""
        recent = inf
        for job in state.all_running():
            came = job.waits_since + WINDOW
            busy = 1.0 if came > state.now else job.spec.utilization
            if came > state.now:
                recent = min(recent, came)
            for gpu in job.gpus:
                draft.load[gpu] = draft.load.get(gpu, 0.0) + busy
        for gpus in (*draft.start.values(), *draft.move.values()):
            for gpu in gpus:
                draft.load[gpu] = 1.0
            recent = min(recent, state.now + WINDOW)
        return recent

    def _squeeze_in(
        self, state: ClusterState, draft: _Draft, job: JobState, gpus: list[int]
    ) -> bool:
        """Put a job on the freest GPUs; they are busy from then on."""
        found = []
        for gpu in gpus:
            if _leaves_a_place(state, draft, gpu) and _fits(state, draft, gpu, job):
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
            draft.memory[gpu] = draft.memory.get(gpu, 0) + job.spec.floor
            draft.count[gpu] += 1
        if not opportunistic:
            draft.claimed.update(gpus)
            draft.used[job.spec.tenant] += len(gpus)


def _used(state: ClusterState) -> Counter[str]:
    """GPUs of each tenant's running jobs that count against its quota."""
    used: Counter[str] = Counter()
    if state.cluster.quotas:
        for job in state.running(0).values():
            if not job.opportunistic:
                used[job.spec.tenant] += len(job.gpus)
    return used


def _within_quota(state: ClusterState, draft: _Draft, job: JobState) -> bool:
    quotas, tenant = state.cluster.quotas, job.spec.tenant
    if not quotas:
        return True
    used = draft.used[tenant]
    # A job larger than its tenant's quota runs when the tenant has nothing else.
    return used + job.spec.gpus <= quotas.get(tenant, 0) or (not used and not draft.start)


def _reserve(draft: _Draft, job: JobState) -> None:
    """Keep other guaranteed jobs away from what one has found so far (line 8)."""
    held = draft.placer.place(min(job.spec.gpus, draft.placer.total))
    if held:
        draft.claimed.update(held)


def _there(state: ClusterState, draft: _Draft, gpu: int) -> list[int]:
    """The jobs that are on a GPU and stay."""
    there = state.occupants(gpu)
    return [i for i in there if i not in draft.stop and i not in draft.leaves]


def _fits(state: ClusterState, draft: _Draft, gpu: int, job: JobState) -> bool:
    cluster, there = state.cluster, _there(state, draft, gpu)
    if len(there) + draft.count[gpu] >= cluster.sharing:
        return False
    used = sum(state.jobs[index].spec.floor for index in there) + draft.memory.get(gpu, 0)
    return used + job.spec.floor <= cluster.nodes[cluster.owner[gpu]].memory


def _leaves_a_place(state: ClusterState, draft: _Draft, gpu: int) -> bool:
    """An opportunistic job must not keep a guaranteed one from coming to a GPU, too."""
    if state.claimed(gpu) or gpu in draft.claimed:
        return True
    return len(_there(state, draft, gpu)) + draft.count[gpu] + 1 < state.cluster.sharing


def _by_load(state: ClusterState, draft: _Draft) -> list[int]:
    """GPUs that are less busy than the limit, the freest first (`minLoadNodes`)."""
    owner, load = state.cluster.owner, draft.load
    found = [
        (load.get(gpu, 0.0), gpu)
        for gpu in range(state.cluster.gpus)
        if load.get(gpu, 0.0) < BUSY and owner[gpu] not in state.down
    ]
    return [gpu for _, gpu in sorted(found)]
