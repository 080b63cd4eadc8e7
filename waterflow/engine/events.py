"""What happens in an engine, as a stream of events that others subscribe to.

Progress, the recorder of the report and whoever waits for a job learn of it here; nothing that
trains calls them. Events are published by the thread on which they happen, and subscribers run
there: they must be quick, safe to call from any lane, and raise nothing.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_args

from waterflow.capture.caller import OnlookerContext
from waterflow.engine.states import JobState
from waterflow.report.job_report import JobReport


class JobJoined(NamedTuple):
    """A job was submitted; `report` is where what becomes of it is written."""

    job: str
    number: int
    total_steps: int | None
    report: JobReport


class StateChanged(NamedTuple):
    """A job is in another state of its life; `error` is what ended it, if an error did."""

    job: str
    before: JobState
    after: JobState
    error: BaseException | None = None


class HeldBack(NamedTuple):
    """A job begins when `other` has ended, as both have a Python object that one of them may
    change; `reason` says which, and who changes it."""

    job: str
    other: str
    reason: str


class EpochEntered(NamedTuple):
    """A job has gone through its data `epoch` times, in so many steps: the losses of the last may
    be yet to come."""

    job: str
    epoch: int
    steps: int


class CaptureKnown(NamedTuple):
    """How much of a job's step is captured, why, and what that took, as in `JobReport`."""

    job: str
    captured: str
    notes: Sequence[str]
    recaptures: int
    tiers: Sequence[str] = ()
    capture_seconds: float = 0.0
    shared_with: str | None = None


class NeedsKnown(NamedTuple):
    """What a job needs of the arena: between steps, and at most, when it runs alone."""

    job: str
    persistent_bytes: int
    solo_peak_bytes: int


class EagerStepBegun(NamedTuple):
    """A step begins that runs as the user's own Python, to be checked against or for good."""

    job: str


class StepChecked(NamedTuple):
    """A captured step has been compared with the eager one."""

    job: str


class GroupsRan(NamedTuple):
    """Node groups of a step of each of these jobs have run, which is not yet counted as done.

    `spans` are tuples of lane, place in `jobs`, group, start and stop, the last two in seconds of
    `time.perf_counter`.
    """

    jobs: Sequence[str]
    spans: Sequence[tuple[Any, ...]]


class StepDone(NamedTuple):
    """A step is done; `step` counts from 1."""

    job: str
    step: int
    loss: float


class TrainRan(NamedTuple):
    """Steps of a job have run one after another and are done; `first`, which counts from 1, is the
    number of the first, `spans` are as in `GroupsRan`, as many for each step.

    For subscribers that ask for it. All others hear of each step by itself.
    """

    job: str
    first: int
    losses: Sequence[float]
    spans: Sequence[tuple[Any, ...]]

    def step_by_step(self) -> Iterator[GroupsRan | StepDone]:
        """The same as events of single steps."""
        each = len(self.spans) // len(self.losses)
        for number, loss in enumerate(self.losses):
            yield GroupsRan((self.job,), self.spans[number * each : (number + 1) * each])
            yield StepDone(self.job, self.first + number, loss)


class Evaluated(NamedTuple):
    """A job was evaluated after so many steps; `values` are the numbers found, by name."""

    job: str
    step: int
    values: Mapping[str, float]


class MemoryMoved(NamedTuple):
    """A job's persistent tensors have come into the arena, or left it: `held` bytes are its now."""

    job: str
    held: int


class ShareChanged(NamedTuple):
    """Somebody has given a job another priority, another weight among its equals, or says that it
    may be slower than alone by so much as a guaranteed one."""

    job: str
    priority: str
    weight: float
    max_slowdown: float


class DutyChanged(NamedTuple):
    """Jobs beside a guaranteed one have another duty: the share of its time in which they may work.

    Attributes:
        job: the guaranteed job.
        others: those that are held back for it.
        duty: their new duty, 0 to 1.
        slowdown: by how much the job was slower than alone, 0.01 is 1 %, and its standard error.
        error: that error.
    """

    job: str
    others: Sequence[str]
    duty: float
    slowdown: float
    error: float


class SlowdownMeasured(NamedTuple):
    """A guaranteed job was compared with itself alone, in turns of some milliseconds.

    Attributes:
        job: the guaranteed job.
        others: those beside it.
        duty: theirs meanwhile, 0 to 1.
        slowdown: by how much the job was slower than alone, 0.01 is 1 %, and its standard error.
        error: that error.
        seconds: that the comparison took.
    """

    job: str
    others: Sequence[str]
    duty: float
    slowdown: float
    error: float
    seconds: float


class PackingDecided(NamedTuple):
    """These jobs go on side by side, or in turns: `gain` is what they do side by side over that."""

    jobs: Sequence[str]
    side_by_side: bool
    gain: float


class LimitChanged(NamedTuple):
    """A job's steps are planned into so many bytes from now on; None: whatever they need."""

    job: str
    limit: int | None


class MemoryLent(NamedTuple):
    """An opportunistic job has another share of the memory, for the sake of jobs that go first.

    Attributes:
        job: the job.
        limit: bytes that it may need from now on; 0: it rests; None: as many as it likes again.
        first: those who ask for more than is left beside it; nobody where it gets some back.
    """

    job: str
    limit: int | None
    first: Sequence[str]


class SpillPlanned(NamedTuple):
    """A job's steps are planned into another limit, or copy something else than before.

    Attributes:
        job: the job.
        limit: bytes that it may need, taking its steps alone; None: any.
        copied_bytes: what a step copies out and back.
        away_bytes: what is not in the budget between steps.
        tier: where values go: "memory" or "disk".
    """

    job: str
    limit: int | None
    copied_bytes: int
    away_bytes: int
    tier: str


class MemoryTried(NamedTuple):
    """Opportunistic jobs that have too little memory for all have tried a share of it.

    Attributes:
        jobs: their names.
        limits: the bytes that each might need.
        speeds: the steps a second that each has made.
        is_last: whether it stays so, as that is what brought most.
    """

    jobs: Sequence[str]
    limits: Sequence[int]
    speeds: Sequence[float]
    is_last: bool = False


class BudgetChanged(NamedTuple):
    """All jobs together may hold so many bytes from now on."""

    budget: int


class CheckpointWritten(NamedTuple):
    """A job's checkpoint after so many steps is on disk: `size` bytes, in so many seconds."""

    job: str
    steps: int
    size: int
    seconds: float


class EngineEnded(NamedTuple):
    """No job will run any more."""


Event = (
    JobJoined
    | StateChanged
    | HeldBack
    | CaptureKnown
    | NeedsKnown
    | EpochEntered
    | EagerStepBegun
    | StepChecked
    | GroupsRan
    | StepDone
    | Evaluated
    | MemoryMoved
    | ShareChanged
    | DutyChanged
    | SlowdownMeasured
    | PackingDecided
    | LimitChanged
    | MemoryLent
    | MemoryTried
    | SpillPlanned
    | BudgetChanged
    | CheckpointWritten
    | EngineEnded
)
Subscriber = Callable[[Any], None]
Kind = type[Event] | type[TrainRan]
EVENTS: tuple[Kind, ...] = get_args(Event)


def muted_by_errors(subscriber: Subscriber) -> Subscriber:
    """A subscriber of a user's that can do no harm: after the first error it hears no more, and a
    warning says so. No job ends because somebody who watches it has failed, and none computes
    with what he draws or sets."""
    failed = False
    context = OnlookerContext()

    def hear(event: Event) -> None:
        nonlocal failed
        if failed:
            return
        try:
            context.run(functools.partial(subscriber, event))
        except Exception as error:
            failed = True
            with contextlib.suppress(Warning):  # filters may turn it into an error
                text = f"the subscriber {subscriber!r} raised {error!r}; it hears no more events"
                warnings.warn(text, RuntimeWarning, stacklevel=2)

    return hear


class EventStream:
    """Passes on each event to all subscribers, in the order of their subscription."""

    def __init__(self) -> None:
        self._of_kind: dict[Kind, tuple[Subscriber, ...]] = dict.fromkeys((*EVENTS, TrainRan), ())
        self._without_trains = self._of_kind.copy()  # those who hear of each step by itself
        self._changing = threading.RLock()  # entered again where a garbage collection unsubscribes
        self.has_ended = False  # whether there will be no more events

    def subscribe(self, subscriber: Subscriber, *kinds: Kind) -> None:
        """Calls `subscriber` with every event from now on; given kinds, with those of them only."""
        with self._changing:
            for kind in kinds or EVENTS:
                self._of_kind[kind] = (*self._of_kind[kind], subscriber)
                if TrainRan not in kinds:
                    self._without_trains[kind] = (*self._without_trains[kind], subscriber)

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Calls it no more."""
        with self._changing:
            for known in (self._of_kind, self._without_trains):
                for kind, subscribers in known.items():
                    known[kind] = tuple(each for each in subscribers if each is not subscriber)

    def publish(self, event: Event) -> None:
        """Tells the subscribers, on the calling thread."""
        for subscriber in self._of_kind[type(event)]:
            subscriber(event)

    def end(self) -> None:
        """Tells the subscribers that there will be no more events."""
        self.has_ended = True  # before they are told: who comes later looks here
        self.publish(EngineEnded())

    def publish_train(self, train: TrainRan) -> None:
        """Tells of many steps at once, or of each, as subscribers have asked."""
        for subscriber in self._of_kind[TrainRan]:
            subscriber(train)
        if self._without_trains[GroupsRan] or self._without_trains[StepDone]:
            for event in train.step_by_step():
                for subscriber in self._without_trains[type(event)]:
                    subscriber(event)
