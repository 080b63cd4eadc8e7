"""Where jobs come in and go out: between steps, on the engine's thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import ClassVar
from weakref import WeakSet

import torch

from waterflow.common.errors import JobError
from waterflow.engine.admission import Admission
from waterflow.engine.context import RunContext
from waterflow.engine.in_flight import StepsInFlight
from waterflow.engine.job_queue import JobQueue
from waterflow.engine.job_run import JobRun
from waterflow.engine.states import JobState
from waterflow.executor.data.feeder import FeedItem
from waterflow.job.data_streams import generators_of
from waterflow.job.job import Job
from waterflow.job.optimizer_state import trained_parameters
from waterflow.steps.prepared import PreparedBatch


def _shared_generator(one: JobRun, other: JobRun) -> JobError:
    return JobError(
        f"jobs {one.name!r} and {other.name!r} draw the order of their batches from one "
        "torch.Generator, so that what each sees would depend on who comes first: give each a "
        "loader with a generator of its own, or without one (then it draws from the job's seed), "
        "or give both wf.shared(loader, seed=0)"
    )


def _trained_elsewhere(one: JobRun, other: JobRun) -> JobError:
    return JobError(
        f"job {one.name!r} and job {other.name!r}, which another engine runs now, share a tensor "
        "that one of them trains: wait until that one has ended, or give each its own copy of the "
        "model (copy.deepcopy) and an optimizer of that copy's parameters"
    )


def _tensors(job: Job) -> tuple[set[int], set[int]]:
    """Identities of all tensors of a job's modules and its optimizer's; those it trains."""
    trained = {id(parameter) for parameter in trained_parameters(job.optimizer)}
    return trained | {id(t) for t in (*job.root.parameters(), *job.root.buffers())}, trained


class Entrance:
    """Lets the jobs of one engine in and out."""

    #: Those of all engines of the process, of which several may begin jobs at the same time.
    _everywhere: ClassVar[WeakSet[Entrance]] = WeakSet()
    _beginning: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self,
        context: RunContext,
        queue: JobQueue,
        admission: Admission,
        in_flight: StepsInFlight,
    ) -> None:
        self._context = context
        self._queue = queue
        self._admission = admission
        self._in_flight = in_flight
        self._everywhere.add(self)

    @property
    def residents(self) -> list[JobRun]:
        """The jobs that have their places in the arena."""
        return [job for job in self._queue.jobs if job.resident]

    def start_new(self) -> None:
        """Begins to prepare the jobs that were submitted since, as many as may wait to begin, but
        for those whose data are not their own: these fail before anybody has fetched a batch."""
        self._queue.take_next()
        before: list[JobRun] = []
        for job in self._queue.jobs:
            is_over = job.ended or job.stop_requested
            begins = job.is_new and not (is_over or self._waits_for_another(job, before))
            if not job.is_gone:
                before.append(job)
            if not begins:
                continue
            with self._beginning:
                error = self._why_refused(job)
                if error is None:
                    job.start()
            if error is not None:
                job.fail(error)

    def _waits_for_another(self, job: JobRun, before: Sequence[JobRun]) -> bool:
        """Whether the job is to begin when one that was submitted before it has left, since both
        have a Python object that one of them may change: the latest of those, so that each of
        hundreds waits for one, in their order.

        Args:
            job: the job.
            before: those that were submitted before it, as far as they have not left.
        """
        if job.is_held_back:
            return True
        for other in reversed(before):
            reason = other.sharing.reason(job.sharing)
            if reason is not None and not other.is_gone:
                job.wait_for(other, reason)
                self._context.wake()  # somebody may wait until all jobs are prepared
                return True
        return False

    def _why_refused(self, job: JobRun) -> Exception | None:
        """Why a new job's data cannot be read beside the others, whatever they raise when they are
        looked at included; where they can, those that read the same memory know of it."""
        try:
            one = self._drawing_from(generators_of(job.job.data))
            if one is not None:
                return _shared_generator(one, job)
            other = self._in_another_engine(job)
            if other is not None:
                return _trained_elsewhere(job, other)
            job.data.join(other.data for other in self._under_way)
        except Exception as error:
            return error
        return None

    @property
    def _under_way(self) -> list[JobRun]:
        return [job for job in tuple(self._queue.jobs) if not (job.is_new or job.ended)]

    def _in_another_engine(self, job: JobRun) -> JobRun | None:
        """A job under way elsewhere that would train what this one has, or the other way round:
        the two would write to the same memory whenever they like."""
        elsewhere = [each for each in self._everywhere if each is not self]
        for other in (job for each in elsewhere for job in each._under_way):
            (own, trains), (others, trains_there) = _tensors(job.job), _tensors(other.job)
            if trains & others or own & trains_there:
                return other
        return None

    def _drawing_from(self, generators: list[torch.Generator]) -> JobRun | None:
        """A job under way that draws its batches from one of these."""
        for job in self._under_way if generators else ():
            known = map(id, generators_of(job.job.data))
            if not set(map(id, generators)).isdisjoint(known):
                return job
        return None

    def end_stopped(self) -> None:
        """Ends the jobs that somebody wants to end."""
        for job in self._queue.jobs:
            if job.stop_requested and not job.ended:
                self._in_flight.complete_all()
                job.end(JobState.STOPPED)

    def suspend_and_resume(self) -> None:
        """Has jobs give up their places that are to rest, and those ask for theirs that are to go
        on."""
        for job in self._queue.jobs:
            if job.ended or job.is_to_rest == (job.state is JobState.SUSPENDED):
                continue
            if not job.is_to_rest:
                job.become(JobState.RESUMING)
            elif job.may_rest:
                self._suspend(job)

    def _suspend(self, job: JobRun) -> None:
        self._in_flight.complete_all()  # its last step may have ended it
        if not job.ended:
            self._context.arena.synchronize()
            self._context.run_isolated(job, job.suspend, self._context.residency)
            self._admission.somebody_left()
        self._context.wake()

    def admit(self) -> None:
        """Admits waiting jobs, those that go first before others, and else in the order of their
        submission, as long as they fit."""
        if self._queue.holds_admission:
            return
        residents = self.residents
        needs = [job.needs.memory for job in residents]
        for job in sorted(self._queue.jobs, key=lambda job: job.priority):
            fed = job.next_batch()
            if job.resident or job.ended or job.is_called_away or fed is None:
                continue
            if job.state is JobState.SUSPENDED:  # resumed a moment ago: it has its turn at once
                continue
            if fed.item is None and not fed.boundary:
                self.end_of_data(job, fed)
                continue
            if self._admission.lacks_budget(job) and self._queue.may_be_resized:
                self._wait_for_budget(job)
                continue
            try:
                self._admission.check(job, residents)
            except Exception as error:  # it looks at all that the jobs have
                job.fail(error)
                continue
            if not self._admission.fits_beside(job, needs):
                self._admission.wait(job)
                if job.state is JobState.PREPARING:
                    job.become(JobState.QUEUED)
                return
            needs.append(job.needs.memory)
            self._let_in(job)
            residents.append(job)

    def _wait_for_budget(self, job: JobRun) -> None:
        """The budget has become too small for the job: it rests, or does not begin, until there is
        a larger one."""
        self._admission.wait(job)
        if job.state is JobState.RESUMING:
            job.gives_way = True
            job.suspend(self._context.residency)
        elif job.state is JobState.PREPARING:
            job.become(JobState.QUEUED)

    def _let_in(self, job: JobRun) -> None:
        context = self._context
        job.tell_of_needs()
        job.become(JobState.RUNNING)
        try:
            context.lanes.commit()
            job.move_in(context.residency)
            job.captured.open_input(None, context.lanes, context.residency)
        except Exception as error:
            job.fail(error)
            context.check_device()
        context.lanes.device.release_unused()

    def dismiss_ended(self) -> None:
        """Has the jobs that have ended give up their places, and lets go of them."""
        for job in self._queue.jobs:
            if job.ended and not job.is_gone:
                self.dismiss(job)
        self._queue.remove_gone()  # those that were never let in, too

    def dismiss(self, job: JobRun) -> None:
        """Has a job that has ended give up its places, and lets go of it."""
        job.move_out(self._context.residency)
        self._queue.remove_gone([job])
        self._admission.somebody_left()
        self._context.tell_of_end()

    def end_of_data(self, job: JobRun, fed: FeedItem[PreparedBatch]) -> None:
        """The job's feeder has come to the end of the data, or has failed."""
        self._in_flight.complete_all()
        if fed.error is not None:
            job.fail(fed.error)
        elif not job.ended:  # by its last step, before that is found to have been its epoch's
            self._context.run_isolated(job, job.loop.enter_epoch, job.loop.epoch + 1)
            job.end(JobState.FINISHED)


def _forked() -> None:
    """Engines of the process that this one was forked from do not run here."""
    Entrance._everywhere.clear()
    Entrance._beginning = threading.Lock()  # a thread that is not here may have had it


os.register_at_fork(after_in_child=_forked)
