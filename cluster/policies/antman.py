"""AntMan: guaranteed jobs by quota, opportunistic ones on what they leave (Xiao et al., OSDI 2020).

Tenants have queues and quotas. Guaranteed jobs start in the order of their tenant's queue, within
its quota, on GPUs without another guaranteed job, together as well as can be; one that does not
fit reserves what is there. Opportunistic jobs go to the GPUs that are busy least, below 80 % in
the last ten seconds (Algorithm 1); reserved GPUs are open to them. A guaranteed job that would wait
runs as opportunistic, and is upgraded where it runs when its tenant's quota and its GPUs allow it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import inf

from waterflow.cluster.free import Placer
from waterflow.cluster.policies.base import Policy
from waterflow.cluster.state import ClusterState, JobState, Plan

BUSY = 0.8  # of the time; a GPU above is left alone
WINDOW = 10.0  # seconds over which that is measured; who came within them counts as busy
PATIENCE = 60.0  # seconds that a guaranteed job waits before it runs as opportunistic


@dataclass
class _Draft:
    placer: Placer
    used: Counter[str]
    start: dict[int, tuple[int, ...]] = field(default_factory=dict)
    opportunistic: dict[int, bool] = field(default_factory=dict)
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
        """Upgrades, then guaranteed jobs, then opportunistic ones."""
        draft = _Draft(state.placer(over_opportunistic=True), _used(state))
        self._upgrade(state, draft)
        self._start_guaranteed(state, draft)
        self._start_opportunistic(state, draft)
        return Plan(start=draft.start, opportunistic=draft.opportunistic, wake=draft.wake)

    def _upgrade(self, state: ClusterState, draft: _Draft) -> None:
        """Job upgrade: where a job runs as opportunistic that has come into its claim."""
        for index, job in sorted(state.running(0).items()):
            if not job.opportunistic or not _within_quota(state, draft, job):
                continue
            if any(state.claimed(gpu) or gpu in draft.claimed for gpu in job.gpus):
                continue
            draft.placer.take(job.gpus, state.cluster.owner)
            draft.claimed.update(job.gpus)
            draft.used[job.spec.tenant] += len(job.gpus)
            draft.opportunistic[index] = False

    def _start_guaranteed(self, state: ClusterState, draft: _Draft) -> None:
        walk = state.pending(0).walk()
        blocked: set[str] = set()
        tenants = max(len(state.cluster.quotas), 1)
        while (head := walk.first()) and (draft.placer.total or len(blocked) < tenants):
            walk.next()
            job = state.jobs[head.job]
            if job.spec.tenant not in blocked and _within_quota(state, draft, job):
                gpus = self._place(state, draft, job)
                if gpus is not None:
                    self._take(state, draft, job, gpus, opportunistic=False)
                    continue
                _reserve(draft, state, job)
            else:
                # First come, first served: nobody of a tenant passes one who waits for quota.
                blocked.add(job.spec.tenant)
            self._wait(state, draft, job)
            if len(draft.impatient) > 256:
                break

    def _place(self, state: ClusterState, draft: _Draft, job: JobState) -> tuple[int, ...] | None:
        """GPUs without a guaranteed job, all on as few nodes as can be, and with enough memory."""
        gpus = draft.placer.place(job.spec.gpus, together=True)
        if gpus is None:
            return None
        if all(_fits(state, draft, gpu, job) for gpu in gpus):
            return gpus
        draft.placer.give(gpus, state.cluster.owner)
        return None

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
        for index in draft.start:
            for gpu in draft.start[index]:
                draft.load[gpu] = 1.0
            recent = min(recent, state.now + WINDOW)
        return recent

    def _squeeze_in(
        self, state: ClusterState, draft: _Draft, job: JobState, gpus: list[int]
    ) -> bool:
        """Put a job on the freest GPUs; they are busy from then on."""
        found = []
        for gpu in gpus:
            if _fits(state, draft, gpu, job):
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
        draft.start[job.spec.index] = gpus
        draft.opportunistic[job.spec.index] = opportunistic
        for gpu in gpus:
            draft.memory[gpu] = _memory(state, draft, gpu) + job.spec.floor
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


def _reserve(draft: _Draft, state: ClusterState, job: JobState) -> None:
    """Keep other guaranteed jobs away from what one has found so far (line 8)."""
    held = draft.placer.place(min(job.spec.gpus, draft.placer.total))
    if held:
        draft.claimed.update(held)


def _memory(state: ClusterState, draft: _Draft, gpu: int) -> int:
    found = draft.memory.get(gpu)
    if found is None:
        found = sum(state.jobs[index].spec.floor for index in state.occupants(gpu))
    return found


def _fits(state: ClusterState, draft: _Draft, gpu: int, job: JobState) -> bool:
    cluster = state.cluster
    if len(state.occupants(gpu)) + draft.count[gpu] >= cluster.sharing:
        return False
    room = cluster.nodes[cluster.owner[gpu]].memory
    return _memory(state, draft, gpu) + job.spec.floor <= room


def _by_load(state: ClusterState, draft: _Draft) -> list[int]:
    """GPUs that are less busy than the limit, the freest first (`minLoadNodes`)."""
    owner, load = state.cluster.owner, draft.load
    found = [
        (load.get(gpu, 0.0), gpu)
        for gpu in range(state.cluster.gpus)
        if load.get(gpu, 0.0) < BUSY and owner[gpu] not in state.down
    ]
    return [gpu for _, gpu in sorted(found)]
