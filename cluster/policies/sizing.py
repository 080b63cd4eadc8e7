"""Plans that change jobs' sizes: who runs on how many GPUs first, and then where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace

from waterflow.cluster.free import Placer
from waterflow.cluster.pending import Rank, Walk
from waterflow.cluster.quotas import Account, Allowance
from waterflow.cluster.state import ClusterState, JobState

Places = dict[int, tuple[int, ...]]


@dataclass
class Draft:
    """Who runs, on how many GPUs, before anyone is placed."""

    room: int
    allowance: Allowance
    sizes: dict[int, int] = field(default_factory=dict)
    stops: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    claims: set[int] = field(default_factory=set)  # guests that are to have one from now on

    def account_in(self, state: ClusterState) -> Callable[[int], Account]:
        """Whose quota a job will count against."""
        jobs, claims = state.jobs, self.claims
        if not state.cluster.quotas:
            return lambda index: None

        def account(index: int) -> Account:
            job = jobs[index]
            return state.account(job, job.opportunistic and index not in claims)

        return account

    def waiting(self, state: ClusterState) -> int:
        """How many jobs would wait for GPUs; those that wait for their tenant's quota do not."""
        count = state.waiting - len(self.starts) + len(self.stops)
        if not state.cluster.quotas or not count:
            return count
        waits: Counter[tuple[Account, int]] = Counter()
        for level in range(state.levels):
            waits.update(state.pending(level).sizes())
        for sign, jobs in ((-1, self.starts), (1, self.stops)):
            for index in jobs:
                job = state.jobs[index]
                waits[state.account(job), job.spec.gpus] += sign
        fits = self.allowance.fits
        return sum(n for (account, gpus), n in waits.items() if fits(account, gpus))


def start_waiting(walk: Walk, draft: Draft, *, half: bool, before: Rank | None = None) -> None:
    """Start, as far as there is room, those that wait and come before a rank."""
    while head := walk.best(draft.room, half=half):
        if before is not None and head.rank >= before:
            break
        size = _size(head.gpus, half)
        draft.starts.append(head.job)
        draft.sizes[head.job] = size
        draft.room -= size
        walk.take(size)


def keep_or_stop(draft: Draft, job: JobState, account: Account, *, half: bool) -> None:
    """A running job goes on, if there is room, and its tenant's quota has some."""
    size = _size(job.spec.gpus, half)
    if size <= draft.room and (account is None or draft.allowance.fits(account, size)):
        draft.sizes[job.spec.index] = size
        draft.room -= size
        draft.allowance.take(account, size)
    else:
        draft.stops.append(job.spec.index)


def grow(state: ClusterState, draft: Draft, placed: Placed) -> None:
    """Give what is idle, one by one, to the job that gains most by one more GPU.

    What a job gains depends on where the GPU is: on another node it may gain nothing.
    """
    if not placed.placer.total:
        return
    gain = _Gains(state)
    most = [(-gain(index, size), index) for index, size in draft.sizes.items()]
    heapify(most)
    owner = state.cluster.owner
    account = draft.account_in(state)
    grown: dict[int, list[int]] = {}
    nodes: dict[int, set[int]] = {}
    while placed.placer.total and most and most[0][0] < 0:
        promised, index = most[0]
        if not draft.allowance.fits(account(index), 1):
            heappop(most)  # its tenant's quota has no more
            continue
        if index not in nodes:
            grown[index] = list(placed.gpus(state, index))
            nodes[index] = {owner[gpu] for gpu in grown[index]}
        here = [node for node in nodes[index] if placed.placer.count(node)]
        # The fewest first: what is left in one piece is left for others.
        node = min(here, key=lambda n: (placed.placer.count(n), n), default=None)
        size = len(grown[index])
        if node is None:
            found = -gain(index, size, len(nodes[index]), len(nodes[index]) + 1)
            if found > promised:
                (heapreplace(most, (found, index)) if found < 0 else heappop(most))
                continue
            node = placed.placer.best_fit(1)
            assert node is not None
            nodes[index].add(node)
        grown[index] += placed.placer.take_from(node, 1)
        draft.sizes[index] = size + 1
        draft.room -= 1
        draft.allowance.take(account(index), 1)
        heapreplace(most, (-gain(index, size + 1, len(nodes[index]), len(nodes[index])), index))
    for index, gpus in grown.items():
        if len(gpus) > len(placed.gpus(state, index)):
            placed.put(index, tuple(sorted(gpus)))


class _Gains:
    """What one more GPU brings, (t(p+1) - t(p)) / t(p); jobs of a kind gain alike."""

    def __init__(self, state: ClusterState) -> None:
        self._jobs, self._speeds = state.jobs, state.speeds
        self._found: dict[tuple[str, int, int, int, int, int], float] = {}

    def __call__(self, index: int, size: int, nodes: int = 1, then: int = 1) -> float:
        spec = self._jobs[index].spec
        kind = (spec.model, spec.batch, spec.gpus, size, nodes, then)
        found = self._found.get(kind)
        if found is None:
            time = self._speeds.step_time
            found = time(spec, size, nodes) / time(spec, size + 1, then) - 1
            self._found[kind] = found
        return found


@dataclass
class Placed:
    """Where a draft's jobs go, and what is left."""

    placer: Placer
    start: Places = field(default_factory=dict)
    move: Places = field(default_factory=dict)

    def gpus(self, state: ClusterState, index: int) -> tuple[int, ...]:
        """A job's GPUs from now on."""
        return self.start.get(index) or self.move.get(index) or state.jobs[index].gpus

    def put(self, index: int, gpus: tuple[int, ...]) -> None:
        """It gets these instead."""
        (self.start if index in self.start else self.move)[index] = gpus


class _Spare:
    """What jobs have beyond their size, by node: taken back where somebody needs it."""

    def __init__(self, state: ClusterState, draft: Draft, placed: Placed) -> None:
        self._state, self._draft, self._placed = state, draft, placed
        self._found: dict[int, list[tuple[int, int]]] | None = None
        self._lost: dict[int, set[int]] = {}

    @property
    def _on(self) -> dict[int, list[tuple[int, int]]]:
        """By node: GPUs, and the jobs that have them. Worked out when it is first asked for."""
        if self._found is None:
            self._found = self._find()
        return self._found

    def _find(self) -> dict[int, list[tuple[int, int]]]:
        found: dict[int, list[tuple[int, int]]] = {}
        owner = self._state.cluster.owner
        for index, size in self._draft.sizes.items():
            gpus = self._state.jobs[index].gpus
            if len(gpus) > size:
                kept = _closest(gpus, size, owner)
                for gpu in gpus[size:] if kept == gpus[:size] else set(gpus).difference(kept):
                    found.setdefault(owner[gpu], []).append((gpu, index))
        return found

    def place(self, count: int) -> tuple[int, ...]:
        """GPUs for a job, on one node if there is any."""
        placer = self._placed.placer
        if placer.best_fit(count) is None and self._on:
            found: tuple[int, int] | None = None  # GPUs that are short, fewest first; node
            for node in sorted(self._on):
                few = count - placer.count(node)
                if (found is None or few < found[0]) and len(self._on[node]) >= few:
                    found = few, node
                    if few == 1:
                        break
            if found is not None:
                self._take(found[1], found[0])
        if count > placer.total:
            self.take_all()
        return _found(placer, count)

    def take_all(self) -> None:
        """Everybody is as large as the draft says."""
        for node in sorted(self._on):
            self._take(node, len(self._on[node]))

    def _take(self, node: int, count: int) -> None:
        there = sorted(self._on.pop(node))
        if there[count:]:
            self._on[node] = there[count:]
        self._give_back(there[:count])

    def _give_back(self, there: Sequence[tuple[int, int]]) -> None:
        self._placed.placer.give([gpu for gpu, _ in there], self._state.cluster.owner)
        for gpu, index in there:
            self._lost.setdefault(index, set()).add(gpu)

    def keep_quotas(self) -> None:
        """What tenants have beyond their quota is taken back; GPUs of those that start count."""
        account, beyond = self._draft.account_in(self._state), Counter[Account]()
        for there in self._on.values():
            beyond.update(account(index) for _, index in there)
        for one, count in beyond.items():
            beyond[one] -= self._draft.allowance.left(one, count)
        for node, there in list(self._on.items()):
            back: list[tuple[int, int]] = []
            for gpu, index in there:
                if beyond[account(index)] > 0:
                    beyond[account(index)] -= 1
                    back.append((gpu, index))
            self._give_back(back)
            self._on[node] = [one for one in there if one not in back]
            if not self._on[node]:
                del self._on[node]

    def settle(self) -> None:
        """Jobs keep what is left to them."""
        draft = self._draft
        account = draft.account_in(self._state)
        for index, size in draft.sizes.items():
            left = len(self._state.jobs[index].gpus) - len(self._lost.get(index, ()))
            if left > size:
                draft.sizes[index] = left
                draft.room -= left - size
                draft.allowance.take(account(index), left - size)
        for index, lost in self._lost.items():
            gpus = self._state.jobs[index].gpus
            self._placed.move[index] = tuple(gpu for gpu in gpus if gpu not in lost)


def place(state: ClusterState, draft: Draft, *, keep: bool) -> Placed:
    """Starts and moves. None grows but one that gets back what it asked for.

    Jobs that are larger than the draft says give what others need, on a node where that is enough,
    and, to `keep`, no more than that: so few jobs change at one event.
    """
    placer, owner = state.placer(), state.cluster.owner
    placed = Placed(placer)
    for index in draft.stops:
        placer.give(state.jobs[index].gpus, owner)
    spare = _Spare(state, draft, placed)
    if not keep:
        spare.take_all()
    elif state.cluster.quotas:
        spare.keep_quotas()
    for index in draft.starts:
        placed.start[index] = spare.place(draft.sizes[index])
    for index, size in draft.sizes.items():
        gpus = state.jobs[index].gpus
        if 0 < len(gpus) < size:
            if size - len(gpus) > placer.total:
                spare.take_all()
            more = _near(placer, {owner[gpu] for gpu in gpus}, size - len(gpus))
            placed.move[index] = tuple(sorted((*gpus, *more)))
    spare.settle()
    return placed


def _closest(gpus: tuple[int, ...], size: int, owner: Sequence[int]) -> tuple[int, ...]:
    """So many of them, on the nodes where most are."""
    if owner[gpus[0]] == owner[gpus[-1]]:  # GPUs are in order
        return gpus[:size]
    there = Counter(owner[gpu] for gpu in gpus)
    best = sorted(gpus, key=lambda gpu: (-there[owner[gpu]], owner[gpu], gpu))
    return tuple(sorted(best[:size]))


def _near(placer: Placer, nodes: set[int], count: int) -> list[int]:
    """So many more GPUs, on these nodes as far as they go."""
    found: list[int] = []
    for node in sorted(nodes):
        found += placer.take_from(node, min(count - len(found), placer.count(node)))
    return [*found, *_found(placer, count - len(found))] if len(found) < count else found


def _size(gpus: int, half: bool) -> int:
    return max(1, gpus // 2) if half else gpus


def _found(placer: Placer, count: int) -> tuple[int, ...]:
    gpus = placer.place(count)
    if gpus is None:
        raise AssertionError(f"{count} GPUs fit by count and were not found")
    return gpus
