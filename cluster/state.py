"""What a policy sees, and what it answers.

A `ClusterState` can only be read; the jobs in it are frozen. A `Plan` is data. So a policy is a
function of the state alone, and the simulator and an engine on real machines can ask the same one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, nan
from typing import Protocol

from waterflow.cluster.free import FreeGpus, Placer
from waterflow.cluster.pending import Level, Rank
from waterflow.cluster.quotas import Account, Allowance, account_of
from waterflow.cluster.spec import ClusterSpec, JobSpec


@dataclass(frozen=True, slots=True)
class JobState:
    """A job at some moment; all times in seconds.

    Attributes:
        spec: what was submitted.
        gpus: the GPUs it runs on; none while it waits.
        level: the queue it is in, 0 the first served.
        rank: its place in its queue, the smallest first.
        left: steps to go at the time `since`.
        step_time: seconds per step from then on, as measured.
        since: when the values here were taken.
        ready: when it makes progress again, after a start, a move or a change of size.
        executed: seconds it has run until `since`.
        attained: GPU seconds it has had until `since`.
        opportunistic: it runs on what others leave; a guaranteed job may, until it is upgraded.
        first_start: when it first ran; nan if it has not.
        waits_since: when it began to wait, or to run.
    """

    spec: JobSpec
    gpus: tuple[int, ...] = ()
    level: int = 0
    rank: Rank = ()
    left: float = 0.0
    step_time: float = inf
    since: float = 0.0
    ready: float = 0.0
    executed: float = 0.0
    attained: float = 0.0
    opportunistic: bool = False
    first_start: float = nan
    waits_since: float = 0.0

    @property
    def running(self) -> bool:
        """It has GPUs."""
        return bool(self.gpus)

    def left_at(self, now: float) -> float:
        """Steps to go."""
        begin = self.ready if self.ready > self.since else self.since
        return self.left - (now - begin) / self.step_time if now > begin else self.left

    def remaining(self, now: float) -> float:
        """Seconds to go on the GPUs it asked for, alone."""
        begin, left = self.ready if self.ready > self.since else self.since, self.left
        if now > begin:  # as in `left_at`: a call less, where all that run are looked at
            left -= (now - begin) / self.step_time
        return left * self.spec.step_seconds

    def service(self, now: float) -> float:
        """GPU seconds it has had."""
        return self.attained + (now - self.since) * len(self.gpus)


class Speeds(Protocol):
    """What is known of how fast jobs are: measured, or from tables.

    Jobs of the same model, batch and number of GPUs scale alike.
    """

    def step_time(self, spec: JobSpec, gpus: int, nodes: int) -> float:
        """Seconds per step alone, on so many GPUs of so many nodes."""

    def shared(self, spec: JobSpec, other: JobSpec) -> float:
        """Speed of a job beside another on its GPUs, of its speed alone: 0 to 1."""


@dataclass(frozen=True)
class Plan:
    """What is to change. Stops come first, then moves, then starts.

    Attributes:
        stop: jobs that give up their GPUs and wait.
        start: jobs that run from now on, and where.
        move: running jobs that go on elsewhere, or on more or fewer GPUs.
        opportunistic: for jobs in `start` or `move`, or running ones: whether they run on what
            others leave (an upgrade says False).
        ranks: jobs whose level and rank change.
        watch: GPU seconds of service at which the policy wants to be asked about a job.
        wake: when it wants to be asked again at the latest.
        memory: what the next state gives back as its `memory`; None leaves that as it is.
    """

    stop: tuple[int, ...] = ()
    start: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    move: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    opportunistic: Mapping[int, bool] = field(default_factory=dict)
    ranks: Mapping[int, tuple[int, Rank]] = field(default_factory=dict)
    watch: Mapping[int, float] = field(default_factory=dict)
    wake: float = inf
    memory: Hashable | None = None


NOTHING = Plan()


class ClusterState:
    """The cluster at some moment, for reading only.

    Attributes:
        now: seconds since the trace's begin.
        turn: how many decisions were made before this one.
        cluster: the machines.
        speeds: what is known of jobs' speeds.
        jobs: all jobs that wait or run, by number.
        reached: jobs whose service has reached what a plan watches for.
        down: nodes that are not there at the moment.
        memory: what the policy's last plan wanted to last.
    """

    def __init__(self, cluster: ClusterSpec, speeds: Speeds, *, classes: bool = True) -> None:
        self.now = 0.0
        self.turn = 0
        self.cluster = cluster
        self.speeds = speeds
        self.jobs: dict[int, JobState] = {}
        self.reached: tuple[int, ...] = ()
        self.down: frozenset[int] = frozenset()
        self.memory: Hashable | None = None
        self._classes = classes  # opportunistic jobs are known, and outside of quotas
        self._free = FreeGpus(cluster)
        self._free_of_guaranteed = FreeGpus(cluster)
        self._pending: list[Level] = [Level()]
        self._running: list[dict[int, JobState]] = [{}]
        self._used = [0]
        self._used_of: list[Counter[Account]] = [Counter()]  # by account; kept where quotas are
        self._occupants: list[tuple[int, ...]] = [()] * cluster.gpus
        self._claims = [0] * cluster.gpus  # jobs on each GPU that are not opportunistic
        self._loads: list[tuple[float, int]] = [(0.0, gpu) for gpu in range(cluster.gpus)]
        self._load_of = [0.0] * cluster.gpus
        # GPUs by how many jobs are on them, but those with none.
        self._by_jobs: list[set[int]] = [set() for _ in range(cluster.sharing + 1)]
        self._smallest: dict[int, int] = {}  # by node, worked out when it is asked for
        self._moved: set[int] = set()  # GPUs whose jobs have changed since then
        self._grown: set[int] = set()
        self._spread: set[int] = set()
        self._load_changed: set[int] = set()  # since the list was last asked for

    @property
    def levels(self) -> int:
        """How many queues there are."""
        return len(self._pending)

    @property
    def waiting(self) -> int:
        """How many jobs wait."""
        return sum(level.count for level in self._pending)

    @property
    def free(self) -> int:
        """GPUs that nobody uses."""
        return self._free.total

    @property
    def available(self) -> int:
        """GPUs of the nodes that are there."""
        return self.cluster.gpus - sum(self.cluster.nodes[n].gpus for n in self.down)

    def pending(self, level: int = 0) -> Level:
        """The jobs that wait in a queue."""
        return self._pending[level]

    def running(self, level: int = 0) -> Mapping[int, JobState]:
        """The jobs of a queue that run."""
        return self._running[level]

    def all_running(self) -> Iterable[JobState]:
        """The jobs that run, queue by queue."""
        return (job for jobs in self._running for job in jobs.values())

    def used(self, level: int = 0) -> int:
        """GPUs that a queue's jobs run on, each counted for each of its jobs."""
        return self._used[level]

    def account(self, job: JobState, opportunistic: bool | None = None) -> Account:
        """Whose quota a job counts against, as it is or if it were, or were not, opportunistic."""
        there = job.opportunistic if opportunistic is None else opportunistic
        return account_of(self.cluster, job.spec, there and self._classes)

    def used_by(self, level: int = 0) -> Mapping[Account, int]:
        """The same by account, where the cluster has quotas."""
        return self._used_of[level]

    def used_by_tenant(self) -> Mapping[str, int]:
        """GPUs that count against each tenant's quota, where the cluster has quotas."""
        used: Counter[str] = Counter()
        for accounts in self._used_of:
            for account, gpus in accounts.items():
                if account is not None:
                    used[account] += gpus
        return used

    def allowance(self, *, running: bool = True) -> Allowance:
        """What quotas leave to jobs that start; or, not counting those that run, to all jobs.

        Every policy goes along `pending(level).walk(allowance)`, which shows no job beyond it.
        """
        kept = running and self.cluster.quotas
        return Allowance(self.cluster.quotas, self.used_by_tenant() if kept else {})

    def claimed(self, gpu: int) -> bool:
        """A job that is not opportunistic runs on this GPU."""
        return self._claims[gpu] > 0

    def occupants(self, gpu: int) -> Sequence[int]:
        """The jobs on a GPU."""
        return self._occupants[gpu]

    def crowded(self) -> Sequence[int]:
        """The GPUs with more than one job."""
        return sorted(gpu for there in self._by_jobs[2:] for gpu in there)

    def shareable(self) -> Iterable[int]:
        """The GPUs that somebody uses and that one more job could share."""
        return (gpu for there in self._by_jobs[1 : self.cluster.sharing] for gpu in there)

    def smallest(self, node: int) -> int:
        """The GPUs that the smallest job on a node asks for; 0 where none is."""
        owner, firsts = self.cluster.owner, self.cluster.firsts
        for gpu in self._moved:
            self._smallest.pop(owner[gpu], None)
        self._moved.clear()
        found = self._smallest.get(node)
        if found is None:
            there = self._occupants[firsts[node] : firsts[node + 1]]
            sizes = (self.jobs[index].spec.gpus for jobs in there for index in jobs)
            found = self._smallest[node] = min(sizes, default=0)
        return found

    def grown(self) -> bool:
        """A job runs on more GPUs than it asked for."""
        return bool(self._grown)

    def spread(self) -> Sequence[int]:
        """The jobs that run on more nodes than they would need."""
        return sorted(self._spread)

    def by_load(self) -> Sequence[tuple[float, int]]:
        """All GPUs with the utilization of the jobs on them, added up: the freest first."""
        for gpu in self._load_changed:
            load = sum(self.jobs[index].spec.utilization for index in self._occupants[gpu])
            old = (self._load_of[gpu], gpu)
            if load != old[0]:
                del self._loads[bisect_left(self._loads, old)]
                insort(self._loads, (load, gpu))
                self._load_of[gpu] = load
        self._load_changed.clear()
        return self._loads

    def placer(self, *, over_opportunistic: bool = False) -> Placer:
        """A search among free GPUs; those of opportunistic jobs alone count as free if asked."""
        return Placer(self._free_of_guaranteed if over_opportunistic else self._free)

    def nodes_of(self, gpus: Iterable[int]) -> int:
        """How many nodes some GPUs lie on."""
        owner = self.cluster.owner
        return len({owner[gpu] for gpu in gpus})
