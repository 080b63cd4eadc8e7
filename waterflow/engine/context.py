"""What the parts of an engine share while jobs run."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

from waterflow.allocator_ext import _C
from waterflow.common.errors import DeviceLostError
from waterflow.engine.callbacks import Callbacks
from waterflow.engine.events import EventStream
from waterflow.engine.job_run import JobRun
from waterflow.engine.python_lock import PythonLock
from waterflow.executor.run.eager_room import Room
from waterflow.executor.run.lanes import Lanes
from waterflow.executor.run.residency import Residency

Value = TypeVar("Value")
Parameters = ParamSpec("Parameters")

GrowRoom = Callable[[JobRun, Room, int, Sequence[JobRun]], bool]
"""Enlarges the room of a job's eager step by so many bytes; nobody is in a step but these jobs, who
wait. Whether it has room now: see `Surges.grow`."""


class Outcome(NamedTuple, Generic[Value]):
    """What something of a user's has returned; there is none where it has failed."""

    value: Value


@dataclass(frozen=True, eq=False)
class RunContext:
    """One engine's lanes and memory, the locks of its threads, and where it tells of events.

    Attributes:
        lanes: the threads that run steps, and the arena.
        residency: the persistent tensors in the arena. Changed by the engine's thread alone, and
            while no step is under way.
        events: what happens.
        check: whether every block goes through the arena, whose log is judged later.
        calls: calls lanes back from their trains of steps; called after what they are to see.
        precedence: the time in which guaranteed jobs work.
        callbacks: where callbacks run.
    """

    lanes: Lanes
    residency: Residency
    events: EventStream
    check: bool
    calls: Any = field(default_factory=_C.Signal)
    precedence: Any = field(default_factory=_C.Precedence)
    callbacks: Callbacks = field(default_factory=Callbacks)

    @functools.cached_property
    def state(self) -> threading.Condition:
        """Guards what users ask for and what feeders have ready; notified when that changes."""
        return threading.Condition(self.callbacks.lock)

    @property
    def python(self) -> PythonLock:
        """Guards what is done for jobs between their steps: callbacks, schedulers, records. Taken
        before `state`, where both are."""
        return self.callbacks.python

    @property
    def outside(self) -> threading.Condition:
        """With the same lock, of those who wait for jobs and not for a turn, users' threads above
        all. Notified when a job is prepared or gone, and when a callback is asked of them: what
        happens at each step is none of their business."""
        return self.callbacks.asked

    @property
    def arena(self) -> Any:
        """The arena of the lanes."""
        return self.lanes.arena

    def wake(self, everybody: bool = True) -> None:
        """Lets whoever waits for a turn look again; `everybody`: lanes under way, and those who
        wait for jobs, too."""
        with self.state:
            if everybody:
                self.calls.call()
                self.outside.notify_all()
            self.state.notify_all()

    def tell_of_end(self) -> None:
        """A job has ended, or has left: whoever waits looks again. Lanes under way go on, as the
        one that it was on looks next who may begin now."""
        with self.state:
            self.outside.notify_all()
            self.state.notify_all()

    def run_isolated(
        self,
        job: JobRun,
        action: Callable[Parameters, Value],
        *arguments: Parameters.args,
        **options: Parameters.kwargs,
    ) -> Outcome[Value] | None:
        """Runs something of the user's, or what looks at objects of his, which may raise anything;
        an error ends this job alone, and None is returned.

        What runs below this is no closure: the error's frames would keep what it encloses.

        Raises:
            DeviceLostError: the device fails every call from now on.
        """
        try:
            return Outcome(action(*arguments, **options))
        except DeviceLostError:
            raise
        except BaseException as error:  # a callback may raise SystemExit, too
            job.fail(error)
            return None

    def lend_lane(
        self,
        lane: int,
        job: JobRun,
        work: Callable[[], None],
        *,
        moves: bool = True,
        patience: float | None = None,
    ) -> None:
        """Has the job's own thread do something in place of the calling lane, which waits.

        Neither keeps the intra-op threads that it does not use meanwhile: they would hinder those
        of others.

        Args:
            lane: the calling thread's.
            job: whose thread it is.
            work: what to do.
            moves: whether it is done on the lane's cores; otherwise on those where the thread is.
            patience: see `Feeder.lend`.
        """
        self._release_team()
        job.feeder.lend(functools.partial(self._work_in_place, lane, work, moves), patience)

    def _work_in_place(self, lane: int, work: Callable[[], None], moves: bool) -> None:
        if moves:
            self.lanes.stand_in(lane)
        work()
        self._release_team()

    def _release_team(self) -> None:
        if self.lanes.threads > 1:
            _C.release_intra_op_threads()

    def check_device(self) -> None:
        """Returns while the device works.

        Raises:
            DeviceLostError: every call on it fails from now on.
        """
        failure = self.lanes.device.failure()
        if failure:
            raise DeviceLostError(
                f"{self.lanes.device.name} is lost: {failure}. A kernel of one of the jobs that "
                "ran has broken the CUDA context, and nothing on the device can be read any more; "
                "losses and times so far are in the report. Restart the process; to find the "
                "kernel, run the jobs one at a time with CUDA_LAUNCH_BLOCKING=1"
            )
