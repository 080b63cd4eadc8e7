"""What all policies share that rank jobs, run the first that fit, and preempt the others."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

from waterflow.cluster.pending import Head, Rank
from waterflow.cluster.policies.base import Policy
from waterflow.cluster.policies.room import Count, MakeRoom, Room
from waterflow.cluster.quotas import Allowance
from waterflow.cluster.state import NOTHING, ClusterState, JobState, Plan


def place_all(
    state: ClusterState, starts: Iterable[int], stops: Iterable[int]
) -> dict[int, tuple[int, ...]]:
    """Places for jobs that are known to fit by count, after others have stopped."""
    placer = state.placer()
    for index in stops:
        placer.give(state.jobs[index].gpus, state.cluster.owner)
    found = {}
    for index in starts:
        gpus = placer.place(state.jobs[index].spec.gpus)
        if gpus is None:
            raise AssertionError(f"job {index} fits by count and has found no place")
        found[index] = gpus
    return found


class RankedPolicy(Policy):
    """Ranks running and waiting jobs together, runs the first that fit, preempts the others."""

    knows_opportunistic = True

    def __init__(self, room: MakeRoom = Count) -> None:
        self._room = room

    @abstractmethod
    def urgency(self, job: JobState, now: float) -> Rank:
        """The smallest runs first; does not change while a job waits."""

    def rank(self, job: JobState, now: float, turn: int) -> Rank:
        """See `Policy`."""
        return (*self.urgency(job, now), job.spec.index)

    def level(self, job: JobState) -> int:
        """Opportunistic jobs have a queue of their own, after all others."""
        return int(job.opportunistic)

    def decide(self, state: ClusterState) -> Plan:
        """Take in the best until nothing fits."""
        if not state.waiting:
            return NOTHING
        room, allowance = self._room(state), state.allowance(running=False)
        starts: list[int] = []
        stops: list[int] = []
        for level in range(state.levels):
            self._take_in(state, level, room, allowance, starts, stops)
        return Plan(stop=tuple(stops), start=place_all(state, starts, stops))

    def _take_in(
        self,
        state: ClusterState,
        level: int,
        room: Room,
        allowance: Allowance,
        starts: list[int],
        stops: list[int],
    ) -> None:
        walk = state.pending(level).walk(allowance)

        def take_waiting(before: Rank | None) -> Head | None:
            """Start those that come before a rank; the next one, if any could still start."""
            while (head := walk.best(room.left)) and (before is None or head.rank < before):
                if room.take(head.gpus):
                    starts.append(head.job)
                    walk.take()
                else:
                    walk.drop()
            return head

        # Room and quotas only shrink, so whoever is next needs no look before it is its turn.
        head = walk.best(room.left)
        quotas = bool(state.cluster.quotas)
        for rank, job in self._behind(state, level, room, allowance, head):
            if head is not None and head.rank < rank:
                head = take_waiting(rank)
            gpus = len(job.gpus)
            account = state.account(job) if quotas else None
            if (quotas and not allowance.fits(account, gpus)) or not room.take(gpus):
                stops.append(job.spec.index)
            elif quotas:
                allowance.take(account, gpus)
        if head is not None:
            take_waiting(None)

    def _behind(
        self,
        state: ClusterState,
        level: int,
        room: Room,
        allowance: Allowance,
        first: Head | None,
    ) -> list[tuple[Rank, JobState]]:
        """The running jobs in order, less those that go on whatever waits: these are taken in.

        Where only numbers count, that is all that come before the first that waits.
        """
        running, now, urgency = state.running(level), state.now, self.urgency
        if not isinstance(room, Count) or state.used(level) > room.left:
            return sorted(((*urgency(job, now), index), job) for index, job in running.items())
        if first is None:
            room.take(state.used(level))
            return []
        # Most come before it, and are passed by at the least cost: this is done at every event.
        bound = first.rank[:-1]
        close = [(u, job) for job in running.values() if (u := urgency(job, now)) >= bound]
        ranked = sorted(((*u, job.spec.index), job) for u, job in close)
        found = [one for one in ranked if one[0] > first.rank]
        room.take(state.used(level) - sum([len(job.gpus) for _, job in found]))
        if state.cluster.quotas:
            for account, gpus in state.used_by(level).items():
                allowance.take(account, gpus)
            for _, job in found:
                allowance.take(state.account(job), -len(job.gpus))
        return found
