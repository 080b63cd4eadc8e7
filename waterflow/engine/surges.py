"""Surges: a job that goes first asks for more than it had, and the others make room for it.

A longer sequence, a second phase, or a job that joins: where what goes first does not fit beside
the opportunistic jobs, not even one step after another, these are planned into what is left of the
budget (`steps/spilling.py`), or rest. It happens between two steps, so whoever asks waits for the
steps that are under way on other lanes, and for nothing else: a job whose smaller steps were not
planned before rests until they are (`replanning`). When what was asked for is not used any more,
limits rise again, half of the way at a time (AntMan, section 3.2).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from waterflow.common.errors import BudgetError, JobError
from waterflow.engine.admission import Admission
from waterflow.engine.context import RunContext
from waterflow.engine.events import MemoryLent
from waterflow.engine.job_queue import JobQueue
from waterflow.engine.job_run import JobRun
from waterflow.engine.limits import Limits
from waterflow.engine.replanning import Replanning
from waterflow.executor.plan.need import fit_in_turn, in_turn_bytes
from waterflow.executor.run.eager_room import Room
from waterflow.partitioner.policies.fair_share import Priority

#: A surge is over when what it was about has not been used for so long, looked at as often; twice
#: as long where the last one had only just been over.
_LEAST_PATIENCE, _MOST_PATIENCE = 0.5, 30.0
#: And while the job has made so many other steps.
_OTHER_STEPS = 8
#: Limits are whole parts of the budget, so that those planned once serve again; differences of
#: less than a part do not matter.
_PARTS = 64
#: A limit that is less than this part below what a job needs is none.
_NEAR = 6


class Surges:
    """Of the jobs of one engine; on the engine's thread, but for `are_over` and `grow`."""

    def __init__(
        self, context: RunContext, queue: JobQueue, admission: Admission, limits: Limits
    ) -> None:
        self._context = context
        self._queue = queue
        self._admission = admission
        self._limits = limits
        self._replanning = Replanning(context)
        limits.before_change = self._replanning.finish
        # Limits into which jobs cannot be planned.
        self._least: WeakKeyDictionary[JobRun, int] = WeakKeyDictionary()
        self._patience = _LEAST_PATIENCE
        self._since = 0.0  # when room was made last
        self._looks: float | None = None  # when it is looked at whether the surge is over
        # Of each kind of step, at the last look.
        self._runs: WeakKeyDictionary[JobRun, dict[object, int]] = WeakKeyDictionary()

    def are_over(self) -> bool:
        """Whether there is something to be looked at between steps; from any thread."""
        is_due = self._looks is not None and time.perf_counter() >= self._looks
        return is_due or self._replanning.is_ready

    def finish(self) -> None:
        """Waits for what is under way; the engine ends."""
        self._replanning.finish()

    # Between steps

    def next(self) -> None:
        """Makes room for whoever goes first and asks for more; gives back what is not used."""
        if self._queue.holds_admission:
            return
        for job in self._residents():
            job.take_up()
        for job in list(self._limits.imposed):
            self._check(job)
        for job, limit, possible in self._replanning.collect():
            self._take_planned(job, limit, possible)
        if self._looks is not None and time.perf_counter() >= self._looks:
            self._look()
        self._settle_among_first()
        others = self._others()
        first = self._first() if others else []
        if first and self._limits.imposed and self._looks is None:  # limits of when nobody did
            self._looks = time.perf_counter() + self._patience
        if first and others and not self._fit([*first, *others]):
            self._make_room(first, others)

    def is_pending(self) -> bool:
        """Whether a job asks for more since then than it has room for."""
        residents = self._residents()
        if any(job.asks_for_laid_aside for job in residents):
            return True
        first = [job for job in residents if job.priority is not Priority.OPPORTUNISTIC]
        if len(first) < 2:
            return bool(first) and len(residents) > 1 and not self._fit(residents)
        capacity = self._limits.capacity
        return not (
            fit_in_turn([job.needs.planned for job in first], capacity)
            and (len(first) == len(residents) or self._fit(residents))
        )

    def _residents(self) -> list[JobRun]:
        return [job for job in self._queue.jobs if job.resident and not job.ended]

    def _may_run(self, job: JobRun) -> bool:
        """Whether the job is in memory, or would be if it found room."""
        if job.ended or job.stop_requested or job.suspend_requested:
            return False
        fed = job.next_batch()
        ready = fed is not None and (fed.item is not None or fed.boundary)
        return job.resident or (ready and self._admission.fits_alone(job))

    def _first(self) -> list[JobRun]:
        """The jobs that go before opportunistic ones: those that stay in memory, and as many of
        those who wait for room as fit beside them."""
        jobs = [job for job in self._queue.jobs if job.priority is not Priority.OPPORTUNISTIC]
        first = [job for job in jobs if job.resident and not (job.ended or job.gives_way)]
        joining = [job for job in jobs if not job.resident and self._may_run(job)]
        for job in sorted(joining, key=lambda job: job.priority):
            if self._fit([*first, job]):
                first.append(job)
        return first

    def _settle_among_first(self) -> None:
        """Where not even those fit beside each other, as one of them makes larger steps by now,
        whoever goes last rests, of equals the one that came last."""
        jobs = [job for job in self._residents() if job.priority is not Priority.OPPORTUNISTIC]
        capacity = self._limits.capacity
        have_grown = any(len(job.steps.cache.specializations()) > 1 for job in jobs)
        if len(jobs) < 2 or not have_grown:  # there may be hundreds
            return
        if fit_in_turn([job.needs.planned for job in jobs], capacity):
            return
        staying: list[JobRun] = []
        for job in sorted(jobs, key=lambda job: job.priority):
            needs = [one.needs.planned for one in (*staying, job)]
            if not staying or fit_in_turn(needs, capacity) or not job.may_rest:
                staying.append(job)
            else:
                self._rest(job, staying)

    def _others(self) -> list[JobRun]:
        """The opportunistic jobs, those in memory first."""
        jobs = [job for job in self._queue.jobs if job.priority is Priority.OPPORTUNISTIC]
        able = [job for job in jobs if self._may_run(job) and not job.is_replanned]
        return sorted(able, key=lambda job: not job.resident)

    def _fit(self, jobs: Sequence[JobRun]) -> bool:
        return fit_in_turn([job.needs.memory for job in jobs], self._limits.capacity)

    def _check(self, job: JobRun) -> None:
        """A job whose new steps cannot keep to the limit that was imposed on it has none."""
        if job.ended:
            self._limits.forget(job)
        elif job.captured.exclusive or job.steps.spiller.problem is not None:
            self._least[job] = max(self._limits.imposed[job], self._least.get(job, 0))
            with contextlib.suppress(BudgetError, JobError):
                self._limits.impose(job, None)

    # Room

    def _make_room(self, first: Sequence[JobRun], others: Sequence[JobRun]) -> None:
        """Gives each of the others a share of what is left, by what it needs."""
        now = time.perf_counter()
        if not self._fit([*first, *(job for job in others if job.resident)]):
            self._runs.clear()
            soon = now - self._since < 4 * self._patience
            self._patience = min(2 * self._patience, _MOST_PATIENCE) if soon else _LEAST_PATIENCE
            self._since, self._looks = now, now + self._patience
        left = self._limits.capacity - in_turn_bytes([job.needs.memory for job in first])
        staying = list(first)
        for place, job in enumerate(others):
            wanted = [self._limits.full(one) for one in others[place:]]
            share = left if sum(wanted) <= left else max(0, left) * wanted[0] // sum(wanted)
            if self._stays(job, self._rounded(share), staying, first):
                staying.append(job)
                left -= job.needs.memory.alone_bytes

    def _rounded(self, size: int) -> int:
        part = max(1, self._limits.capacity // _PARTS)
        return size // part * part

    def _stays(
        self, job: JobRun, share: int, staying: Sequence[JobRun], first: Sequence[JobRun]
    ) -> bool:
        """Has a job come down to its share, or rest; returns whether it stays in memory."""
        if job.needs.memory.alone_bytes <= share:
            return job.resident
        if job.may_spill and share > self._least.get(job, 0):
            if job.steps.spiller.is_planned(share):
                return self._lower(job, share, first) and job.resident
            self._rest(job, first)
            self._replanning.start(job, share)
            return False
        if job.resident and not self._fit([*staying, job]):
            self._rest(job, first)
        return job.resident and not job.gives_way

    def _lower(self, job: JobRun, limit: int, first: Sequence[JobRun]) -> bool:
        try:
            self._limits.impose(job, limit)
        except (BudgetError, JobError):
            self._least[job] = max(limit, self._least.get(job, 0))
            self._rest(job, first)
            return False
        self._tell(job, limit, first)
        return True

    def _rest(self, job: JobRun, first: Sequence[JobRun]) -> None:
        """Has a job that is in memory rest, until there is room for it."""
        if job.resident and not job.gives_way:
            job.gives_way = True
            self._looks = self._looks or time.perf_counter() + self._patience
            self._tell(job, 0, first)

    def _take_planned(self, job: JobRun, limit: int, possible: bool) -> None:
        """A job that rests comes back under the limit that its steps are planned into now."""
        if job.ended:
            return
        if not possible:
            self._least[job] = max(limit, self._least.get(job, 0))
        elif self._lower(job, limit, self._first()):
            self._admission.somebody_left()

    def _tell(self, job: JobRun, limit: int | None, first: Sequence[JobRun] = ()) -> None:
        guaranteed = [one for one in first if one.priority is Priority.GUARANTEED]
        names = tuple(one.name for one in guaranteed or first)
        self._context.events.publish(MemoryLent(job.name, limit, names))

    # When it is over

    def _look(self) -> None:
        """What is not used any more is counted no longer; limits rise where there is room."""
        first = self._first()
        if not first and self._limits.is_learning:
            self._looks = None
            return
        for job in first:
            if job.resident:
                self._lay_aside(job)
        left = self._limits.capacity
        if first:
            left -= in_turn_bytes([job.needs.memory for job in first])
        limited = [job for job in self._limits.imposed if not job.ended and not job.is_replanned]
        for job in limited:
            self._raise(job, left, limited)
        waits = any(job.gives_way for job in self._queue.jobs if not job.ended)
        goes_on = bool(self._limits.imposed) or waits
        self._looks = time.perf_counter() + self._patience if goes_on else None

    def _lay_aside(self, job: JobRun) -> None:
        kinds = job.steps.cache.specializations()
        runs: dict[object, int] = {kind: kind.runs for kind in kinds}
        former = self._runs.get(job)
        if former is None:
            self._runs[job] = runs
            return
        made = {kind: count - former.get(kind, 0) for kind, count in runs.items()}
        if sum(made.values()) >= _OTHER_STEPS:
            job.lay_aside([kind for kind in kinds if not made[kind]])
            self._runs[job] = runs

    def _raise(self, job: JobRun, left: int, limited: Sequence[JobRun]) -> None:
        """Gives a job half of what its limit is below its share, or all where little is left."""
        limit, full = self._limits.imposed[job], self._limits.full(job)
        wanted = sum(map(self._limits.full, limited))
        share = full if wanted <= left else max(0, left) * full // wanted
        part = self._limits.capacity // _PARTS
        if share - limit <= part and share < full:
            return
        halfway = self._rounded((limit + share) // 2)
        higher = None if share == full and full - halfway <= full // _NEAR else halfway
        try:
            self._limits.impose(job, higher)
        except (BudgetError, JobError):
            return
        self._admission.somebody_left()
        self._tell(job, higher)

    # In the middle of a step

    def grow(self, job: JobRun, room: Room, size: int, busy: Sequence[JobRun]) -> bool:
        """Enlarges the room of a job's eager step or evaluation, which asks for more in its middle.

        As far as that is needed others rest at once: those who go after it, the last first, and
        then those who go before it, but for guaranteed ones, which do so for nobody who is not. It
        is for one step: what the job needs is known then, and who has room beside whom. Where that
        is not enough, garbage is collected: it may hold tensors.

        Args:
            job: in the step. Nobody else is in one, but those who are `busy` and wait.
            room: its room.
            size: bytes that its room has not.
            busy: who cannot rest now.

        Returns:
            Whether it has room now.
        """
        grows = functools.partial(self._grow, job, room, size, busy)
        return grows() or (gc.collect() > 0 and grows())

    def _grow(self, job: JobRun, room: Room, size: int, busy: Sequence[JobRun]) -> bool:
        arena = self._context.arena
        limit = arena.limit(job.number)
        if limit is not None and int(arena.held(job.number)) + size > limit:
            return False  # it is its own limit that is in the way, and not who else is there
        if room.grow(size) or (self._dismiss_ended(busy) and room.grow(size)):
            return True
        able = [one for one in self._residents() if one not in (job, *busy)]
        able = [one for one in able if one.may_rest and _may_rest_for(one, job)]
        free = self._limits.capacity - int(arena.statistics().live)
        if free + sum(int(arena.held(one.number)) for one in able) + room.size < size:
            return False
        for one in sorted(able, key=lambda one: (one.priority, one.number), reverse=True):
            one.gives_way = True
            self._tell(one, 0, [job])
            one.suspend(self._context.residency)
            self._looks = time.perf_counter() + self._patience
            if room.grow(size):
                return True
        return False

    def _dismiss_ended(self, busy: Sequence[JobRun]) -> bool:
        """Has jobs that have ended since the last step of all leave; whether there are any."""
        ended = [one for one in self._queue.jobs if one.ended and one.resident and one not in busy]
        for one in ended:
            one.move_out(self._context.residency)
        if ended:
            self._admission.somebody_left()
        return bool(ended)


def _may_rest_for(one: JobRun, job: JobRun) -> bool:
    """Whether a job may be made to rest so that another one's step need not fail."""
    return one.priority is not Priority.GUARANTEED or job.priority is Priority.GUARANTEED
