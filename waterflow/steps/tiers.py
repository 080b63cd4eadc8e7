"""Which tier a job's steps run in: the user's own Python at first, a capture where that will pay.

As compilers that watch what they run: a job trains from its first step, eagerly and exactly. Its
steps are captured when those still to come are expected to save more time than the capture takes.
What a capture takes, and what it brings, is learnt from those before. `WATERFLOW_TIERS=off` in the
environment has every step captured before it runs first, as `Job(capture=True)` has.
"""

from __future__ import annotations

import math
import os
import statistics
import threading
from collections import Counter, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from waterflow.common.units import format_bytes
from waterflow.executor.plan.need import MemoryNeed
from waterflow.job.job import Job
from waterflow.steps.shared_captures import kind_of
from waterflow.steps.side_by_side import SideBySide

#: What a capture takes until one was made: so much, and so much for each tensor that a step makes.
_CAPTURE_SECONDS, _CAPTURE_SECONDS_PER_TENSOR = 0.015, 2.2e-4
#: Tensors that a step makes, where nobody has counted them.
_TENSORS = 100
#: What each job takes to join a capture, its own or another's (an account, a tape, a check), of
#: what a capture takes, until one has joined.
_JOIN = 0.25
#: So many times what it takes to find the capture: with its tensors' places, its first check and
#: what waits meanwhile. (200 jobs of 30 steps: 2.2 ms to find it, some 6 in all.)
_WHOLE_JOIN = 2.5
#: Where steps have to be tried first, as they run much code, what it takes to come to know that
#: beyond what is usual is taken again so many times for the capture (trials, looks at all that they
#: reach), and so many times for each job. (A small BERT: 0.2 s, 0.7 s and 0.2 s.)
_LOOKS_OF_CAPTURE, _LOOKS_OF_JOIN, _USUAL_LOOK = 4.0, 1.0, 0.005
#: What a captured step saves of the time for each tensor that the eager one makes, and at most, at
#: first; and the seconds of steps from which on what is seen outweighs that.
_SAVED_PER_TENSOR, _MOST_SAVED, _PRIOR_SECONDS = 8e-6, 0.6, 0.1
#: What eager steps of two jobs gain side by side at least, where they do not lose.
_GAIN_BESIDE = 1.3
#: What the engine adds to an eager step, which captured ones do without; and to a train of captured
#: ones, which ends where batches of another shape come.
_EAGER_SECONDS, _TRAIN_SECONDS = 1e-4, 4e-4
#: A capture has to save so many times what it takes, and to join it, as forecasts err; many jobs
#: that join each other's err less. Of what it takes beyond so many seconds, eager steps have to
#: take so much before: a job that ends sooner than was foreseen has lost little by its capture.
_MARGIN, _JOIN_MARGIN, _AT_ONCE_SECONDS, _SPENT_BEFORE = 2.0, 1.2, 0.05, 0.1
#: So many jobs, those that have ended last, tell how early others may end.
_MOST_ENDS = 64
#: Steps of a shape that come before a decision: the first is not like the others. Where others have
#: the capture, what they took is known, and that one makes the optimizer's state is enough.
_LEAST_STEPS = 2
#: One that is for several jobs asks for so many measured steps, of any of them: of hundreds some
#: first step always takes long, and what the first of them is taken to save, all are.
_LEAST_MEASURED = 3
#: Of so many kinds of batches that is remembered: data may have ever new ones.
_MOST_SIGHTS = 1024
#: So many steps of a shape are measured, and then every so many; so many are remembered.
_MEASURED = 16

#: A job may need so many times its parameters (gradients, the optimizer's state), and so many times
#: its batch (activations), to take a step, as far as anybody can tell before one was taken.
_PARAMETERS, _BATCHES, _LEAST_GUESS = 4, 64, 1 << 16
#: Eager steps want so many times what one needs of the budget: where memory is short, captured ones
#: need less of it, and what they need is known.
_ROOMY = 3


def guess_need(parameters: int, batch: int) -> MemoryNeed:
    """What a job may need, before it has taken a step.

    Args:
        parameters: bytes of parameters and buffers.
        batch: bytes of a batch.
    """
    return MemoryNeed(_PARAMETERS * parameters, _BATCHES * batch + _LEAST_GUESS)


@dataclass
class _Shape:
    """Steps on batches of one signature.

    Attributes:
        steps: eager ones.
        captured: the others.
        measured: seconds that the latest eager ones took.
        seconds: their median: the second one may take ten times as long as the others.
        tensors: that one of them makes.
        next_look: when to decide again.
        waits_until: that many are eager, whatever a capture would bring.
    """

    steps: int = 0
    captured: int = 0
    measured: deque[float] = field(default_factory=lambda: deque(maxlen=_MEASURED))
    seconds: float = 0.0
    tensors: int = _TENSORS
    next_look: int = _LEAST_STEPS
    waits_until: int = 0


class Cost(NamedTuple):
    """Seconds that it takes to have the steps of jobs captured.

    Attributes:
        capture: to make the capture.
        joins: for all of the jobs to join it: an account, a tape and a check each.
    """

    capture: float
    joins: float

    @property
    def seconds(self) -> float:
        """All that it takes."""
        return self.capture + self.joins

    @property
    def least_saved(self) -> float:
        """What captured steps have to save."""
        return _MARGIN * self.capture + _JOIN_MARGIN * self.joins


class CaptureCosts:
    """What captures have taken and brought so far, in one engine. Safe to use from any thread.

    Attributes:
        side_by_side: whether eager steps, with which captures are compared, run beside each other.
    """

    def __init__(self, lanes: int) -> None:
        """Takes the number of lanes, on which captured steps run beside each other."""
        self._lanes = lanes
        self.side_by_side = SideBySide()
        self._lock = threading.Lock()
        # What captures took of what was guessed, as if one had taken just that. The first of a
        # process takes several times as long as those after it.
        self._took: deque[float] = deque([1.0], maxlen=_MEASURED)
        self._joins: deque[float] = deque(maxlen=_MEASURED)
        self._eager, self._captured = 0.0, 0.0
        self._ends: deque[float] = deque(maxlen=_MOST_ENDS)  # how much of its steps each had made
        self._numbers: dict[Hashable, int] = {}  # of kinds, which are long
        self._alike: Counter[int] = Counter()  # jobs that have not ended, by kind
        self._come: Counter[int] = Counter()  # all that have come
        self._to_come = 0
        self._made: dict[Hashable, bool] = {}  # captures, and whether all who look alike may join
        self._steps: dict[Hashable, deque[float]] = {}  # eager ones' seconds, of all who look alike
        # Steps of all of a kind, and how often one was on a batch of another shape than before.
        self._made_of, self._turns = Counter[int](), Counter[int]()
        self._eager_kinds: dict[int, str] = {}  # whose steps stay eager Python, and why
        self._looks: dict[int, float] = {}  # what a look took, of kinds that have to be tried

    def join(self, kind: Hashable) -> int:
        """A job has come whose captures may be shared with others of this kind.

        Returns:
            By what the kind is known from now on.
        """
        with self._lock:
            number = self._numbers.setdefault(kind, len(self._numbers))
            self._alike[number] += 1
            self._come[number] += 1
            return number

    def expect(self, jobs: int) -> None:
        """So many jobs are still to come, of whatever kind."""
        self._to_come = jobs

    def leave(self, kind: int, made: float = 1.0) -> None:
        """It has ended, with so much of its steps made."""
        with self._lock:
            self._alike[kind] -= 1
            self._ends.append(made)

    def expected(self, made: float) -> float:
        """What part of its steps a job is expected to make yet, with so much of them made: as much
        as those made that have ended later, and as if one more had come to its end."""
        with self._lock:
            later = [end for end in self._ends if end > made]
        return (1.0 + sum(later)) / (1 + len(later)) - made

    def alike(self, kind: int) -> int:
        """How many of a kind have not ended."""
        return self._alike[kind]

    def to_come(self, kind: int) -> int:
        """How many of a kind are still to come: as large a share of all as of those that came."""
        with self._lock:
            return self._to_come * self._come[kind] // max(1, self._come.total())

    def cost(self, kind: int, tensors: int, sight: Hashable = None, jobs: int = 1) -> Cost:
        """What it will take to have jobs' steps captured.

        Args:
            kind: of the jobs.
            tensors: that a step makes.
            sight: what the capture may be known by to those who have made it already.
            jobs: how many of them join it.
        """
        with self._lock:
            made = sight is not None and sight in self._made
            learnt = statistics.median_low(self._took)
            capture = self._guess(tensors)
            join = statistics.median_low((_JOIN * capture, *self._joins))
            look = self._looks.get(kind, 0.0)
        capture = 0.0 if made else capture * learnt + _LOOKS_OF_CAPTURE * look
        return Cost(capture, max(join, _LOOKS_OF_JOIN * look) * jobs)

    def longest_look(self, saved: float, sight: Hashable, jobs: int) -> float:
        """What a look may have taken so that what `cost` says of it is no more than
        captured steps save.

        Args:
            saved: these seconds.
            sight, jobs: see there.
        """
        capture = 0.0 if sight in self._made else _LOOKS_OF_CAPTURE
        looks = Cost(capture, _LOOKS_OF_JOIN * jobs).least_saved
        return _USUAL_LOOK + saved / looks if looks else math.inf

    def saved_seconds(
        self, eager: float, tensors: int, beside: bool, train: float = math.inf
    ) -> float:
        """What a captured step will save of the wall time of an eager one.

        Args:
            eager: what the eager one takes of its thread.
            tensors: how many tensors it makes.
            beside: whether eager steps of several jobs run beside each other, too.
            train: how many captured steps come one after another.
        """
        saved = min(_SAVED_PER_TENSOR * tensors, _MOST_SAVED * eager)
        with self._lock:
            seen = self._captured + _PRIOR_SECONDS * (1 - saved / eager if eager else 1.0)
            captured = eager * seen / (self._eager + _PRIOR_SECONDS)
            together = max(1, min(self._lanes, self._alike.total()))
        eager += _EAGER_SECONDS
        eager /= min(together, _GAIN_BESIDE) if beside else 1
        return eager - captured / together - _TRAIN_SECONDS / train

    def note_capture(
        self, tensors: int, seconds: float, sight: Hashable = None, measured: bool = False
    ) -> None:
        """A step that makes so many tensors was captured in so many seconds; `measured`: it is
        known what the eager one takes."""
        with self._lock:
            if guess := self._guess(tensors):
                self._took.append(seconds / guess)
            # One that had to be made again serves not all who look alike: its cost is not known.
            self._made[sight] = measured and sight not in self._made

    def note_look(self, kind: int, seconds: float) -> None:
        """Steps of jobs of this kind have to be tried before a capture; to come to know that took
        so long."""
        with self._lock:
            self._looks[kind] = max(seconds - _USUAL_LOOK, self._looks.get(kind, 0.0))

    def note_stays_eager(self, kind: int, why: str) -> None:
        """Steps of jobs of this kind are no better captured."""
        with self._lock:
            self._eager_kinds[kind] = why

    def why_eager(self, kind: int) -> str | None:
        """Why nobody of this kind is captured; None where that is not known to be so."""
        return self._eager_kinds.get(kind)

    def is_made(self, sight: Hashable) -> bool:
        """Whether a capture is known by this that others may join."""
        return self._made.get(sight, False)

    def note_run(self, kind: int, steps: int, turns: bool) -> None:
        """A job of this kind has made so many steps on batches of one shape; `turns`: the step
        before was on one of another."""
        with self._lock:
            self._made_of[kind] += steps
            self._turns[kind] += turns

    def train_length(self, kind: int) -> float:
        """How many steps of jobs of this kind come one after another on batches of one shape;
        infinite where no shape has followed on another."""
        with self._lock:
            turns = self._turns[kind]
            return self._made_of[kind] / turns if turns else math.inf

    def note_eager(self, sight: Hashable, seconds: float) -> None:
        """An eager step of a job whose capture would be known by this took so long."""
        with self._lock:
            self._steps.setdefault(sight, deque(maxlen=_MEASURED)).append(seconds)
            if len(self._steps) > _MOST_SIGHTS:
                del self._steps[next(iter(self._steps))]

    def eager_seconds(self, sight: Hashable) -> float:
        """What eager steps of those who look alike take; 0.0 where too few were measured."""
        with self._lock:
            found = self._steps.get(sight, ())
            return statistics.median_low(found) if len(found) >= _LEAST_MEASURED else 0.0

    def note_join(self, seconds: float) -> None:
        """A job has joined another's capture, in so many seconds."""
        with self._lock:
            self._joins.append(seconds)

    def note_steps(self, eager: float, captured: float) -> None:
        """Captured steps have taken so many seconds, where eager ones would have taken others."""
        with self._lock:
            self._eager += eager
            self._captured += captured

    @staticmethod
    def _guess(tensors: int) -> float:
        return _CAPTURE_SECONDS + _CAPTURE_SECONDS_PER_TENSOR * tensors


@dataclass(eq=False)
class Tiers:
    """The tiers of one job's steps.

    Attributes:
        job: whose steps.
        costs: what captures take and bring, learnt by all jobs of the engine.
        budget: of the engine, in bytes.
        guess: what the job may need, until a step has shown it; None before its first batch is
            there.
        insists: whether every batch from now on is to be captured, whether that pays or not.
    """

    job: Job
    costs: CaptureCosts
    budget: int
    guess: MemoryNeed | None = None
    insists: bool = False
    _starts_eagerly: bool = True
    _steps: int = 0
    _shapes: dict[Hashable, _Shape] = field(default_factory=dict)
    _captured: dict[Hashable, str] = field(default_factory=dict)  # and why
    _reasons: dict[Hashable, str] = field(default_factory=dict)  # why not
    _kind: int = -1
    _latest: Hashable = None  # the signature of the latest batch

    def __post_init__(self) -> None:
        self._kind = self.costs.join(kind_of(self.job))

    def meet(self, parameters: int, batch: int) -> None:
        """The first batch is there.

        A job that may fill the budget is captured before its first step: what it needs is known
        then, and nothing has run if that is too much.

        Args:
            parameters: bytes of its parameters and buffers.
            batch: bytes of the batch.
        """
        if self.guess is None:
            self.guess = guess_need(parameters, batch)
            self._starts_eagerly = _ROOMY * self.guess.alone_bytes <= self.budget

    @property
    def is_free(self) -> bool:
        """Whether the job's steps may be eager Python as long as they are not captured."""
        return self._starts_eagerly and not self.insists

    def note_stays_eager(self, why: str) -> None:
        """This job's steps are no better captured, nor are those of others like it."""
        self.costs.note_stays_eager(self._kind, why)

    def may_start_eagerly_in(self, budget: int) -> bool:
        """Whether a job like this begins with eager steps under such a budget."""
        return self.guess is None or _ROOMY * self.guess.alone_bytes <= budget

    def note_need(self, need: int) -> None:
        """Steps have shown that the job needs so many bytes alone."""
        self._starts_eagerly = self._starts_eagerly and _ROOMY * need <= self.budget

    def close(self) -> None:
        """The job has ended."""
        self.costs.leave(self._kind, self._made)

    @property
    def is_alone(self) -> bool:
        """Whether it is the only job under way whose captures others of its kind may share."""
        return self.costs.alike(self._kind) <= 1

    @property
    def remaining(self) -> int:
        """Steps still to come, as far as can be expected: as many as were made, where nobody
        knows; and jobs may end early, as a search's trials do."""
        total = self.job.total_steps
        return self._steps if total is None else round(total * self.costs.expected(self._made))

    @property
    def _made(self) -> float:
        """How much of its steps it has made."""
        total = self.job.total_steps
        return min(1.0, self._steps / total) if total else 1.0

    def measures(self, signature: Hashable) -> bool:
        """Whether the time of the next eager step on such a batch is to be taken."""
        shape = self._shapes.get(signature)
        return shape is None or shape.steps <= _MEASURED or shape.steps % _MEASURED == 0

    def note_step(
        self, signature: Hashable, seconds: float | None = None, tensors: int | None = None
    ) -> None:
        """An eager step was made on a batch of this signature.

        Args:
            signature: the batch's.
            seconds: what it has taken of its thread, if that was measured.
            tensors: how many it has made, if that was counted.
        """
        shape = self._shapes.get(signature)
        if shape is None:
            shape = self._shapes[signature] = _Shape()
        shape.steps += 1
        self._note_run(signature)
        if shape.steps > 1 and seconds is not None:
            self.costs.note_eager((self._kind, signature), seconds)
            shape.measured.append(seconds)
            shape.seconds = statistics.median_low(shape.measured)
        if tensors is not None:
            shape.tensors = tensors

    def note_begun(self, steps: int = 1) -> None:
        """Steps of the job have begun, of whatever kind."""
        self._steps += steps

    def stays_eager(self, signature: Hashable) -> bool:
        """Whether the next step on such a batch is the user's own Python."""
        if signature in self._captured:
            return False
        if self.insists:
            self._captured[signature] = "captured at once: eager steps know no limit"
            return False
        if not self._starts_eagerly:
            why = f"the budget of {format_bytes(self.budget)} may be short for eager steps"
            self._captured[signature] = f"captured at once: {why}"
            return False
        shape = self._shapes.get(signature)
        if shape is None or shape.steps < shape.waits_until:
            return True
        early = shape.steps < shape.next_look
        if (early and shape.seconds) or self.costs.why_eager(self._kind):  # the first asks nobody
            return True
        sight = self._kind, signature
        known, common = self.costs.is_made(sight), self.costs.eager_seconds(sight)
        alike = self._alike
        if (early and not (known and common)) or (alike > 1 and not common):
            return True
        shape.seconds = common or shape.seconds
        shape.next_look = shape.steps + max(1, shape.steps // 2)
        pays, text, cost = self._weighed(signature, shape)
        if not pays:
            return True
        spent = math.inf if known else shape.steps * shape.seconds * alike
        if spent < _SPENT_BEFORE * (cost - _AT_ONCE_SECONDS):
            too_soon = "but is not made before steps have taken a tenth of that"
            self._reasons[signature] = f"{text}, {too_soon}"
            return True
        self._reasons.pop(signature, None)
        self._captured[signature] = f"captured after {shape.steps} eager steps: {text}"
        return False

    @property
    def _alike(self) -> int:
        """How many jobs would share a capture, with those to come."""
        return max(1, self.costs.alike(self._kind)) + self.costs.to_come(self._kind)

    def _weighed(self, signature: Hashable, shape: _Shape) -> tuple[bool, str, float]:
        """Whether a capture for such batches pays, its costs and gains in words, and the costs;
        that it does not is the reason for eager steps."""
        alike, sight = self._alike, (self._kind, signature)
        saved = self._gain(shape) * alike
        cost = self.costs.cost(self._kind, shape.tensors, sight, alike)
        text = f"a capture takes about {cost.seconds:.2f} s and saves about {saved:.2f} s"
        pays = saved >= cost.least_saved
        if not pays:
            self._reasons[signature] = f"{text}, so it does not pay"
        return pays, text, cost.seconds

    def longest_look(self, signature: Hashable) -> float:
        """Seconds after which a look at the job's code has taken more than a capture may save, if
        its steps have to be tried first; infinite where they are captured whatever it takes."""
        shape = self._shapes.get(signature)
        if shape is None or not shape.seconds or not self.is_free:
            return math.inf
        alike, sight = self._alike, (self._kind, signature)
        return self.costs.longest_look(self._gain(shape) * alike, sight, alike)

    def gives_up_capture(self, signature: Hashable, seconds: float) -> bool:
        """Whether steps on such batches stay eager after all: they would have to be tried before a
        capture, as they run much code; to come to know that took so many seconds."""
        shape = self._shapes.get(signature)
        if shape is None or not shape.seconds or not self.is_free:
            return False
        self.costs.note_look(self._kind, seconds)
        pays, _, _ = self._weighed(signature, shape)
        if not pays:
            self._captured.pop(signature, None)
        return not pays

    def postpone(self, signature: Hashable, steps: int, why: str) -> None:
        """So many steps on such batches stay eager before anything is captured for them again."""
        shape = self._shapes[signature]
        shape.waits_until = shape.steps + steps
        self._captured.pop(signature, None)
        again = f"looked at again after {steps} eager steps"
        self._reasons[signature] = f"{why} before a capture has saved what it takes, so {again}"

    def note_capture(self, signature: Hashable, seconds: float, shared: bool) -> None:
        """Steps on such batches were captured, or found captured, in so many seconds."""
        shape = self._shapes.get(signature)
        if shared:
            self.costs.note_join(_WHOLE_JOIN * seconds)
        elif shape is not None:
            sight = self._kind, signature
            self.costs.note_capture(shape.tensors, seconds, sight, shape.seconds > 0.0)

    def note_captured_steps(self, signature: Hashable, steps: int, seconds: float) -> None:
        """So many captured steps on such batches have taken so many seconds of their thread, as
        eager ones are measured: whoever waits for the interpreter's lock would wait with both."""
        shape = self._shapes.get(signature)
        self._note_run(signature, steps)
        if shape is not None:
            shape.captured += steps
        if shape is not None and shape.measured:
            self.costs.note_steps(shape.seconds * steps, seconds)

    def runs_to_pay(self, signature: Hashable) -> float:
        """How many captured steps on such batches save what it takes to have them captured, and
        checked; 0.0 where that is not known, or eager ones are no choice."""
        shape = self._shapes.get(signature)
        if shape is None or not shape.seconds or not self.is_free:
            return 0.0
        saved = self._saved(shape)
        cost = self.costs.cost(self._kind, shape.tensors).seconds
        return cost / saved if saved > 0 else math.inf

    def reasons(self) -> list[str]:
        """What ran in which tier, and why: a line for each kind of batch, the commonest first."""
        lines, opaque = [], self.costs.why_eager(self._kind)
        as_before = opaque and f"not captured, as with one before: {opaque}"
        common = sorted(self._shapes.items(), key=lambda item: -item[1].steps)
        for number, (signature, shape) in enumerate(common, 1):
            reason = as_before or self._reasons.get(signature, "too few steps")
            why = self._captured.get(signature, reason)
            kind = f"batches of shape {number}: " if len(common) > 1 else ""
            lines.append(f"{kind}{shape.steps} eager steps; {why}")
        return lines or sorted(set(self._captured.values()))

    def _note_run(self, signature: Hashable, steps: int = 1) -> None:
        self.costs.note_run(self._kind, steps, turns=self._latest not in (None, signature))
        self._latest = signature

    def _gain(self, shape: _Shape) -> float:
        """Seconds that captured steps on such batches would save from now on. Jobs whose steps are
        alike share captures, and are taken to have as much before them."""
        made = sum(other.steps + other.captured for other in self._shapes.values())
        expected = self.remaining * (shape.steps + shape.captured) / made
        return self._saved(shape) * expected

    def _saved(self, shape: _Shape) -> float:
        """Seconds that one captured step on such a batch saves."""
        beside = shape.seconds > self.costs.side_by_side.fine_seconds * shape.tensors
        train = self.costs.train_length(self._kind)
        return self.costs.saved_seconds(shape.seconds, shape.tensors, beside, train)


def are_on() -> bool:
    """Whether jobs begin with eager steps."""
    return os.environ.get("WATERFLOW_TIERS", "on") != "off"
