"""The life of a job: its states, and which may follow which.

    queued -> preparing -> running -> finished
      ^          |          |   ^
      +----------+          v   |
      +--------------> suspended -> resuming

A job may be suspended before it has run, and what is left of its data may be nothing once it is
resumed. From every state but the last ones a job may be stopped or fail. What users see of it
(`status`, the report, progress) is a projection, `JobState.status`.
"""

from __future__ import annotations

import enum

from waterflow.report.job_report import State


class JobState(enum.Enum):
    """Where a job is in its life.

    Each has the word under which users see it: a job that is being prepared is queued for them.
    """

    QUEUED = "queued"
    """Submitted, or prepared and waiting for room."""
    PREPARING = "preparing"
    """Its first batch is fetched, its first step captured and profiled."""
    RUNNING = "running"
    """Its persistent tensors have their places in the arena."""
    SUSPENDED = "suspended"
    """It has given up its places for a while."""
    RESUMING = "resuming"
    """It is about to have them again."""
    STOPPED = "stopped"
    FINISHED = "finished"
    FAILED = "failed"
    OUT_OF_MEMORY = "out_of_memory"

    @property
    def ended(self) -> bool:
        """Whether the job will run no more."""
        return self._value_ in _ENDED

    @property
    def status(self) -> State:
        """The word for it in reports, in progress and for `JobHandle.status`."""
        return _STATUS[self]


class TransitionError(RuntimeError):
    """A job was to go from one state to another that cannot follow it: a defect of the engine."""


_ENDS = frozenset({JobState.STOPPED, JobState.FAILED, JobState.OUT_OF_MEMORY})
_FOLLOWERS: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: _ENDS | {JobState.PREPARING, JobState.RUNNING, JobState.SUSPENDED},
    # Its data may end, or it may need no step at all, before it has run.
    JobState.PREPARING: _ENDS
    | {JobState.QUEUED, JobState.RUNNING, JobState.SUSPENDED, JobState.FINISHED},
    JobState.RUNNING: _ENDS | {JobState.SUSPENDED, JobState.FINISHED},
    JobState.SUSPENDED: _ENDS | {JobState.RESUMING},
    JobState.RESUMING: _ENDS | {JobState.RUNNING, JobState.SUSPENDED, JobState.FINISHED},
    JobState.STOPPED: frozenset(),
    JobState.FINISHED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.OUT_OF_MEMORY: frozenset(),
}
#: By their words, as hundreds of jobs are asked at each turn, and members hash slowly.
_ENDED = frozenset(state.value for state, following in _FOLLOWERS.items() if not following)
_STATUS: dict[JobState, State] = {
    JobState.QUEUED: "queued",
    JobState.PREPARING: "queued",
    JobState.RUNNING: "running",
    JobState.SUSPENDED: "suspended",
    JobState.RESUMING: "suspended",
    JobState.STOPPED: "stopped",
    JobState.FINISHED: "finished",
    JobState.FAILED: "failed",
    JobState.OUT_OF_MEMORY: "out_of_memory",
}


def transition(job: str, present: JobState, to: JobState) -> JobState:
    """The state that the job named `job` is in next.

    Raises:
        TransitionError: `to` cannot follow `present`.
    """
    if to not in _FOLLOWERS[present]:
        possible = ", ".join(sorted(state.value for state in _FOLLOWERS[present])) or "nothing"
        raise TransitionError(
            f"job {job!r} is {present.value} and cannot become {to.value}; {possible} may follow"
        )
    return to
