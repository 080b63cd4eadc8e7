"""The cluster state as its owner keeps it: a simulator, or an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from waterflow.cluster.pending import Level
from waterflow.cluster.state import ClusterState, JobState


class StateStore(ClusterState):
    """A `ClusterState` that can be written; policies are given it as what it derives from."""

    def put(self, job: JobState) -> None:
        """A job is new, or is no longer as it was."""
        old = self.jobs.get(job.spec.index)
        if old is not None and old.gpus and job.gpus and _same_queue(old, job):
            self._resize(old, job)
            return
        self.remove(job.spec.index)
        self._add_levels(job.level)
        index = job.spec.index
        self.jobs[index] = job
        if not job.gpus:
            self._pending[job.level].add(job.spec.gpus, job.rank, index, self.account(job))
            return
        self._running[job.level][index] = job
        self._count(job, len(job.gpus))
        self._note_shape(job)
        self._occupy(index, job.gpus, job.opportunistic)

    def put_same_place(self, job: JobState) -> None:
        """Like `put`, for a running job of which neither GPUs, level nor class have changed."""
        self.jobs[job.spec.index] = self._running[job.level][job.spec.index] = job

    def remove(self, index: int) -> None:
        """A job is gone; nothing if it was not there."""
        job = self.jobs.pop(index, None)
        if job is None:
            return
        if not job.gpus:
            self._pending[job.level].remove(job.spec.gpus, job.rank, index, self.account(job))
            return
        del self._running[job.level][index]
        self._spread.discard(index)
        self._grown.discard(index)
        self._count(job, -len(job.gpus))
        self._vacate(index, job.gpus, job.opportunistic)

    def _count(self, job: JobState, more: int) -> None:
        self._used[job.level] += more
        if self.cluster.quotas:
            self._used_of[job.level][self.account(job)] += more

    def _note_shape(self, job: JobState) -> None:
        (self._grown.add if len(job.gpus) > job.spec.gpus else self._grown.discard)(job.spec.index)
        need = -(-len(job.gpus) // self.cluster.largest)
        if len(job.gpus) > 1 and self.nodes_of(job.gpus) > need:
            self._spread.add(job.spec.index)
        else:
            self._spread.discard(job.spec.index)

    def _resize(self, old: JobState, job: JobState) -> None:
        """A running job goes on on other GPUs: only what differs is touched."""
        index, before, after = job.spec.index, set(old.gpus), set(job.gpus)
        self.put_same_place(job)
        self._count(job, len(job.gpus) - len(old.gpus))
        if old.gpus != job.gpus:
            self._note_shape(job)
        gone = tuple(gpu for gpu in old.gpus if gpu not in after)
        self._vacate(index, gone, job.opportunistic)
        new = tuple(gpu for gpu in job.gpus if gpu not in before)
        self._occupy(index, new, job.opportunistic)

    def _occupy(self, index: int, gpus: tuple[int, ...], opportunistic: bool) -> None:
        alone = []
        self._load_changed.update(gpus)
        self._moved.update(gpus)
        for gpu in gpus:
            there = self._occupants[gpu]
            self._occupants[gpu] = (*there, index)
            if not there:
                alone.append(gpu)
            self._recount(gpu, len(there), len(there) + 1)
        self._free.take(alone)
        if not opportunistic:
            self._claim(gpus)

    def _vacate(self, index: int, gpus: tuple[int, ...], opportunistic: bool) -> None:
        alone = []
        self._load_changed.update(gpus)
        self._moved.update(gpus)
        for gpu in gpus:
            there = self._occupants[gpu] = tuple(j for j in self._occupants[gpu] if j != index)
            self._recount(gpu, len(there) + 1, len(there))
            if not there:
                alone.append(gpu)
        self._free.give(alone)
        if not opportunistic:
            self._unclaim(gpus)

    def _recount(self, gpu: int, before: int, after: int) -> None:
        while len(self._by_jobs) <= after:  # for a moment, while jobs change places
            self._by_jobs.append(set())
        if before:
            self._by_jobs[before].discard(gpu)
        if after:
            self._by_jobs[after].add(gpu)

    def _claim(self, gpus: tuple[int, ...]) -> None:
        """One more job has a claim to these."""
        self._free_of_guaranteed.take([gpu for gpu in gpus if not self._claims[gpu]])
        for gpu in gpus:
            self._claims[gpu] += 1

    def _unclaim(self, gpus: tuple[int, ...]) -> None:
        for gpu in gpus:
            self._claims[gpu] -= 1
        self._free_of_guaranteed.give([gpu for gpu in gpus if not self._claims[gpu]])

    def take_down(self, node: int) -> None:
        """A node is gone: its GPUs, on which nobody runs any more, are not free."""
        self.down |= {node}
        self._free.take(self._gpus_of(node))
        self._free_of_guaranteed.take(self._gpus_of(node))

    def bring_up(self, node: int) -> None:
        """A node is back."""
        self.down -= {node}
        self._free.give(self._gpus_of(node))
        self._free_of_guaranteed.give(self._gpus_of(node))

    def _gpus_of(self, node: int) -> Iterable[int]:
        return range(self.cluster.firsts[node], self.cluster.firsts[node + 1])

    def _add_levels(self, level: int) -> None:
        while len(self._pending) <= level:
            self._pending.append(Level())
            self._running.append({})
            self._used.append(0)
            self._used_of.append(Counter())


def _same_queue(old: JobState, job: JobState) -> bool:
    return old.level == job.level and old.opportunistic == job.opportunistic
