"""Discrete events on a heap of (time, kind, sequence): the same input gives the same run.

All events of one moment happen, then the policy is asked once, then its plan is carried out. What
a job has done is not counted up event by event: a state says what it had at some moment and how
fast it goes since, so an event costs what it changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from math import inf, isinf, isnan

from waterflow.cluster.local.coordinator import Limits, OnGpu, limits
from waterflow.cluster.local.memory import MemoryRule, coordinated, squeezed
from waterflow.cluster.local.turns import server_shares
from waterflow.cluster.pending import Rank
from waterflow.cluster.policies.base import Policy
from waterflow.cluster.simulator.checks import check_jobs, check_quotas
from waterflow.cluster.simulator.costs import FREE, Costs
from waterflow.cluster.simulator.failures import NO_FAILURES, Failures
from waterflow.cluster.simulator.record import Record
from waterflow.cluster.simulator.results import Results
from waterflow.cluster.simulator.speeds import Plain
from waterflow.cluster.spec import ClusterSpec, JobSpec
from waterflow.cluster.state import ClusterState, JobState, Plan, Speeds
from waterflow.cluster.store import StateStore

# At one moment: ends before failures before arrivals, so that a policy sees what is free.
_FINISH, _DOWN, _UP, _ARRIVE, _WATCH, _WAKE = range(6)
_ALL = -1  # in place of a job: all jobs that end next, where every event moves every end

Event = tuple[float, int, int, int, int]
Check = Callable[[ClusterState, Plan], None]
Progress = Callable[[float, int, int], None]


class Simulation:
    """One policy on one trace."""

    def __init__(
        self,
        jobs: Sequence[JobSpec],
        cluster: ClusterSpec,
        policy: Policy,
        *,
        speeds: Speeds | None = None,
        costs: Costs = FREE,
        failures: Failures = NO_FAILURES,
        sharing: Limits = limits,
        memory: MemoryRule = coordinated,
        memory_grows: bool = True,
        check: Check | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._jobs = tuple(jobs)
        check_jobs(self._jobs, cluster, policy)
        self._policy = policy
        self._speeds: Speeds = speeds or Plain()
        self._costs = costs
        self._failures = failures
        self._sharing = sharing
        self._memory = memory
        # Frameworks as they are never get back what they did not have when they began.
        self._had: dict[int, int] | None = None if memory_grows else {}
        self._check = check
        self._progress = progress
        self._state = StateStore(cluster, self._speeds, classes=policy.knows_opportunistic)
        self._record = Record(self._jobs)
        self._heap: list[Event] = []
        self._sequence = 0
        self._versions = [0] * len(jobs)  # of a job's end: an event of an older one is void
        self._watched = [inf] * len(jobs)
        self._turns: dict[int, dict[int, float]] = {}  # by node, until its jobs change
        self._wake_version = 0
        self._wake = inf  # when the last plan wants the policy to be asked again
        self._ending: list[int] = []
        self._unfinished = len(jobs)
        self._events = 0
        self._down_at: dict[int, float] = {}

    def run(self) -> Results:
        """Simulate until all jobs are done, nothing happens any more, or somebody interrupts."""
        begin = time.perf_counter()
        self._heap = [(job.submit, _ARRIVE, n, job.index, 0) for n, job in enumerate(self._jobs)]
        heapify(self._heap)
        self._sequence = len(self._heap)
        for at, node in self._failures.first(self._state.cluster):
            self._push(at, _DOWN, node, 0)
        interrupted = False
        try:
            while self._heap and self._unfinished:
                if self._advance():
                    self._decide()
                    if self._stands_still():
                        break
        except KeyboardInterrupt:
            interrupted = True  # what is done is given back
        seconds = time.perf_counter() - begin
        done = self._unfinished == 0
        return self._record.results(
            self._policy.name, self._events, seconds, finished=done, interrupted=interrupted
        )

    def _stands_still(self) -> bool:
        """Nodes may fail and come back for ever, and nothing else will ever happen."""
        state = self._state
        waits = state.waiting == self._unfinished  # all have come, and none of them runs
        return waits and not state.down and isinf(self._wake)

    def _push(self, at: float, kind: int, subject: int, version: int) -> None:
        self._sequence += 1
        heappush(self._heap, (at, kind, self._sequence, subject, version))

    def _advance(self) -> bool:
        """Let all happen that happens at the next moment; whether anything has."""
        heap, state = self._heap, self._state
        now = heap[0][0]
        happened, reached = False, []
        while heap and heap[0][0] == now:
            _, kind, _, subject, version = heappop(heap)
            if kind == _WATCH:
                if self._versions[subject] == version:
                    reached.append(subject)
                continue
            if not self._is_void(kind, subject, version):
                state.now = now
                self._happen(kind, subject)
                happened = True
        # A job that is done in the same moment has nothing to be watched for.
        state.reached = tuple(index for index in dict.fromkeys(reached) if index in state.jobs)
        if not happened and not state.reached:
            return False
        state.now = now
        if self._costs.every_event is not None:
            self._charge_all()
        return True

    def _is_void(self, kind: int, subject: int, version: int) -> bool:
        if kind == _FINISH:
            current = self._wake_version if subject == _ALL else self._versions[subject]
            return version != current
        return kind == _WAKE and version != self._wake_version

    def _happen(self, kind: int, subject: int) -> None:
        if kind == _FINISH:
            for index in self._ending if subject == _ALL else (subject,):
                self._finish(index)
        elif kind == _ARRIVE:
            self._arrive(self._jobs[subject])
        elif kind == _DOWN:
            self._fail(subject)
        elif kind == _UP:
            self._state.bring_up(subject)
            self._push(self._failures.next(subject, self._state.now), _DOWN, subject, 0)

    def _arrive(self, spec: JobSpec) -> None:
        state = self._state
        job = JobState(
            spec,
            left=spec.steps,
            since=state.now,
            ready=state.now,
            opportunistic=not spec.guaranteed,
            waits_since=state.now,
        )
        level = self._policy.level(job)
        rank = self._policy.rank(job, state.now, state.turn)
        state.put(_with(job, level=level, rank=rank))

    def _finish(self, index: int) -> None:
        state = self._state
        job = state.jobs[index]
        self._versions[index] += 1
        self._record.done(job, state.now)
        state.remove(index)
        self._unfinished -= 1
        if self._costs.every_event is None:  # else all are counted up first, and then sped anew
            self._respeed(self._beside(job.gpus))

    def _fail(self, node: int) -> None:
        """Stop a node's jobs, which begin again where the last checkpoint was, and close it."""
        state = self._state
        cluster = state.cluster
        gpus = range(cluster.firsts[node], cluster.firsts[node + 1])
        for index in sorted({j for gpu in gpus for j in state.occupants(gpu)}):
            job = state.jobs[index]
            lost = self._failures.lost(state.now - job.waits_since)
            left = min(job.spec.steps, job.left_at(state.now) + lost / job.step_time)
            self._change(job, (), not job.spec.guaranteed)  # as one that a plan stops
            state.put(_with(state.jobs[index], left=left))
            self._respeed(self._beside(job.gpus))
        state.take_down(node)
        self._push(state.now + self._failures.repair, _UP, node, 0)

    def _charge_all(self) -> None:
        """Count up every running job, less what the event costs it (see `Costs.every_event`)."""
        state, charge = self._state, self._costs.every_event
        assert charge is not None
        now = state.now
        for job in list(state.all_running()):
            passed = now - job.since
            worked = max(passed - charge(job.spec), 0.0)
            state.put_same_place(
                _with(
                    job,
                    left=job.left - worked / job.step_time,
                    since=now,
                    ready=now,
                    executed=job.executed + passed,
                    attained=job.attained + passed * len(job.gpus),
                )
            )

    def _decide(self) -> None:
        state = self._state
        plan = self._policy.decide(state)
        if self._check is not None:
            self._check(state, plan)
        self._events += 1
        state.turn += 1
        state.memory = state.memory if plan.memory is None else plan.memory
        self._carry_out(plan)
        if state.cluster.quotas:
            check_quotas(state, self._policy)
        state.reached = ()
        self._record.moment(state)
        self._wake_version += 1
        self._wake = plan.wake
        if not isinf(plan.wake):
            self._push(max(plan.wake, state.now), _WAKE, 0, self._wake_version)
        if self._costs.every_event is not None:
            self._push_next_end()
        if self._progress is not None and self._events % 4096 == 0:
            self._progress(state.now, len(self._jobs) - self._unfinished, len(self._jobs))

    def _carry_out(self, plan: Plan) -> None:
        state, touched = self._state, set()
        for index, limit in plan.watch.items():
            self._watched[index] = limit
        for index in plan.stop:
            touched |= self._beside(state.jobs[index].gpus)
            self._change(state.jobs[index], (), not state.jobs[index].spec.guaranteed, plan)
        changes = {**plan.move, **plan.start, **dict.fromkeys(plan.opportunistic)}
        # All leave their old places before anyone takes a new one: two jobs may change places.
        for index in plan.move:
            job = state.jobs[index]
            touched |= self._beside(job.gpus)
            self._leave(job, plan.move[index])
        for index in changes:
            job = state.jobs[index]
            gpus = plan.start.get(index) or plan.move.get(index) or job.gpus
            self._change(job, gpus, plan.opportunistic.get(index, job.opportunistic), plan)
            touched |= self._beside(gpus)
        for index, (level, rank) in plan.ranks.items():
            job = state.jobs[index]
            if (job.level, job.rank) != (level, rank):
                state.put(_with(job, level=level, rank=rank))
        if self._policy.shares:
            every = self._costs.every_event is not None
            self._respeed([job.spec.index for job in state.all_running()] if every else touched)
        for index in plan.watch:
            if index not in changes:
                self._push_watch(state.jobs[index])

    def _leave(self, job: JobState, gpus: tuple[int, ...]) -> None:
        """Count up a job that is moving, and take it off the GPUs that it gives up."""
        state, stays = self._state, set(gpus)
        self._record.left_place(job, state.now)
        state.put(_counted(job, state.now, tuple(gpu for gpu in job.gpus if gpu in stays)))

    def _change(
        self, job: JobState, gpus: tuple[int, ...], opportunistic: bool, plan: Plan | None = None
    ) -> None:
        """Stop, start, move, resize or reclassify a job."""
        state, index = self._state, job.spec.index
        now = state.now
        previous = self._record.places[index]
        same = gpus == previous
        ready = job.ready if same else now + self._cost(job, previous, gpus)
        level, rank = self._place_in_queue(job, gpus, opportunistic, plan)
        step_time = inf
        if gpus:
            step_time = self._speeds.step_time(job.spec, len(gpus), state.nodes_of(gpus))
        fresh = _counted(job, now, gpus)
        state.put(
            _with(
                fresh,
                level=level,
                rank=rank,
                step_time=step_time,
                ready=max(ready, now),
                opportunistic=opportunistic,
                first_start=now if gpus and isnan(job.first_start) else job.first_start,
                waits_since=job.waits_since if previous and gpus else now,
            )
        )
        self._record.changed(job, gpus, opportunistic, now)
        self._versions[index] += 1
        if gpus:
            self._push_end(state.jobs[index])
            self._push_watch(state.jobs[index])

    def _place_in_queue(
        self, job: JobState, gpus: tuple[int, ...], opportunistic: bool, plan: Plan | None
    ) -> tuple[int, Rank]:
        if plan is not None and job.spec.index in plan.ranks:
            return plan.ranks[job.spec.index]
        if gpus:
            return job.level, job.rank
        waits = _with(_counted(job, self._state.now, ()), opportunistic=opportunistic)
        rank = self._policy.rank(waits, self._state.now, self._state.turn)
        return self._policy.level_after_stop(waits), rank

    def _cost(self, job: JobState, before: tuple[int, ...], gpus: tuple[int, ...]) -> float:
        costs = self._costs
        if not gpus:
            return 0.0
        if not before:
            return costs.start + (0.0 if isnan(job.first_start) else costs.resume)
        if len(gpus) == len(before):
            return costs.move
        return costs.grow if len(gpus) > len(before) else costs.shrink

    def _beside(self, gpus: Iterable[int]) -> set[int]:
        """The jobs on some GPUs."""
        if not self._policy.shares:
            return set()
        if self._policy.turns_on_servers:
            cluster = self._state.cluster
            nodes = {cluster.owner[gpu] for gpu in gpus}
            for node in nodes:  # whoever asks is about to change them, or has
                self._turns.pop(node, None)
            gpus = (g for n in nodes for g in range(cluster.firsts[n], cluster.firsts[n + 1]))
        return {index for gpu in gpus for index in self._state.occupants(gpu)}

    def _respeed(self, jobs: Iterable[int]) -> None:
        """Say anew how fast jobs are, whose neighbours have changed."""
        state = self._state
        if self._costs.every_event is not None:
            self._turns.clear()
        for index in sorted(jobs):
            job = state.jobs.get(index)
            if job is None or not job.gpus:
                continue
            alone = self._speeds.step_time(job.spec, len(job.gpus), state.nodes_of(job.gpus))
            share = self._share(job)
            step_time = alone / share if share else inf
            if step_time != job.step_time:
                state.put_same_place(_with(_counted(job, state.now, job.gpus), step_time=step_time))
                self._versions[index] += 1
                self._push_end(state.jobs[index])
                self._push_watch(state.jobs[index])

    def _share(self, job: JobState) -> float:
        """A job is as fast as on the GPU where it is slowest."""
        state, share = self._state, 1.0
        if self._policy.turns_on_servers:
            index, owner = job.spec.index, state.cluster.owner
            return min(self._turns_on(node)[index] for node in {owner[gpu] for gpu in job.gpus})
        seen: set[tuple[tuple[int, ...], int]] = set()
        for gpu in job.gpus:
            there = tuple(state.occupants(gpu))
            memory = state.cluster.nodes[state.cluster.owner[gpu]].memory
            enough = job.spec.memory <= memory
            if (len(there) == 1 and enough and not self._had) or (there, memory) in seen:
                continue
            seen.add((there, memory))
            jobs = self._on_gpu(there)
            at = there.index(job.spec.index)
            speed = self._sharing(jobs, self._speeds)[at]
            if job.spec.memory:
                speed *= squeezed(job.spec, self._given(jobs, at, memory))
            share = min(share, speed)
        return share

    def _on_gpu(self, jobs: Iterable[int]) -> list[OnGpu]:
        known = self._state.jobs
        return [OnGpu(known[index].spec, known[index].opportunistic) for index in jobs]

    def _turns_on(self, node: int) -> dict[int, float]:
        if node not in self._turns:
            firsts = self._state.cluster.firsts
            jobs = [self._state.occupants(g) for g in range(firsts[node], firsts[node + 1])]
            if all(len(there) < 2 for there in jobs):  # most nodes, most of the time
                self._turns[node] = {index: 1.0 for there in jobs for index in there}
            else:
                there = [self._on_gpu(one) for one in jobs]
                self._turns[node] = server_shares(there, self._speeds)
        return self._turns[node]

    def _given(self, jobs: Sequence[OnGpu], at: int, memory: int) -> int:
        """The bytes of a GPU that one of the jobs on it has."""
        given = self._memory(jobs, memory)[at]
        if self._had is not None:
            index = jobs[at].spec.index
            given = self._had[index] = min(given, self._had.get(index, given))
        return given

    def _push_end(self, job: JobState) -> None:
        if self._costs.every_event is None and not isinf(job.step_time):
            begin = max(job.since, job.ready)
            end = max(begin + job.left * job.step_time, self._state.now)
            self._push(end, _FINISH, job.spec.index, self._versions[job.spec.index])

    def _push_next_end(self) -> None:
        """The next job, or jobs, to end if no other event comes before."""
        now, best = self._state.now, inf
        for job in self._state.all_running():
            end = now + job.left * job.step_time
            if end < best:
                best, self._ending = end, []
            if end == best:
                self._ending.append(job.spec.index)
        if not isinf(best):
            self._push(max(best, now), _FINISH, _ALL, self._wake_version)

    def _push_watch(self, job: JobState) -> None:
        limit = self._watched[job.spec.index]
        if job.gpus and not isinf(limit):
            at = job.since + (limit - job.attained) / len(job.gpus)
            version = self._versions[job.spec.index]
            self._push(max(at, self._state.now), _WATCH, job.spec.index, version)


def _with(job: JobState, **changes: object) -> JobState:
    """A copy with changes; `dataclasses.replace` takes three times as long."""
    get = changes.get
    return JobState(
        job.spec,
        get("gpus", job.gpus),  # type: ignore[arg-type]
        get("level", job.level),  # type: ignore[arg-type]
        get("rank", job.rank),  # type: ignore[arg-type]
        get("left", job.left),  # type: ignore[arg-type]
        get("step_time", job.step_time),  # type: ignore[arg-type]
        get("since", job.since),  # type: ignore[arg-type]
        get("ready", job.ready),  # type: ignore[arg-type]
        get("executed", job.executed),  # type: ignore[arg-type]
        get("attained", job.attained),  # type: ignore[arg-type]
        get("opportunistic", job.opportunistic),  # type: ignore[arg-type]
        get("first_start", job.first_start),  # type: ignore[arg-type]
        get("waits_since", job.waits_since),  # type: ignore[arg-type]
    )


def _counted(job: JobState, now: float, gpus: tuple[int, ...]) -> JobState:
    """What a job has done until now, and where it goes on."""
    passed = now - job.since if job.gpus else 0.0
    return _with(
        job,
        gpus=gpus,
        left=job.left_at(now) if job.gpus else job.left,
        since=now,
        executed=job.executed + passed,
        attained=job.attained + passed * len(job.gpus),
    )
