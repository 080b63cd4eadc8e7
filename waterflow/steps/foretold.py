"""What a job's schedulers will do after each of its next steps, worked out ahead as data.

Torch's own schedulers compute numbers from numbers, so copies of them tell beforehand what they
will write, and where. The extension then writes it step by step (`_C.Schedule`): the job's own
objects are at every moment what they are in the plain loop, and nobody sees a number before its
time. What a copy cannot tell for sure is left to the schedulers themselves: users' own, those with
a user's function or other values than plain ones, those that follow a metric, a step that may warn
or raises.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import lr_scheduler

from waterflow.account.class_parts import CLASS_NOISE
from waterflow.account.trust import is_trusted_class, is_trusted_code
from waterflow.allocator_ext import _C
from waterflow.capture.optimizer import OptimizerTrace
from waterflow.capture.traced_floats import holds, leaves, traceable
from waterflow.job.job import Job
from waterflow.job.optimizer_state import (
    HyperKey,
    hyperparameters,
    numbers_of,
    same_hyperparameters,
    same_value,
)
from waterflow.job.several import schedulers_in
from waterflow.steps.prepared import PreparedStep

#: Those whose `step` reads and writes nothing but their own attributes and the optimizer's groups.
KNOWN = frozenset(
    {
        lr_scheduler.ChainedScheduler,
        lr_scheduler.ConstantLR,
        lr_scheduler.CosineAnnealingLR,
        lr_scheduler.CosineAnnealingWarmRestarts,
        lr_scheduler.CyclicLR,
        lr_scheduler.ExponentialLR,
        lr_scheduler.LinearLR,
        lr_scheduler.MultiStepLR,
        lr_scheduler.OneCycleLR,
        lr_scheduler.PolynomialLR,
        lr_scheduler.SequentialLR,
        lr_scheduler.StepLR,
    }
)
#: What they write to, in the optimizer's groups.
WRITTEN = frozenset({"lr", "momentum", "betas"})

#: So many steps are worked out at once: as many small batches as a feeder holds.
_AT_ONCE = 256
#: And at first, where nobody knows how many are to come.
_AT_FIRST = 8

_MISSING = object()
#: What a scheduler's step calls of it.
_METHODS = ("step", "get_lr")


class _UnforeseenError(Exception):
    """What a scheduler does next is to be seen when it does it."""


@dataclass(frozen=True, eq=False)
class Foretold:
    """What comes between the next steps.

    Attributes:
        schedule: what the schedulers write after each, for the extension.
        registers: what the first of the steps reads, by the registers of its tape.
        steps: so many may be made; what comes after the last of them may be left to the schedulers.
    """

    schedule: Any
    registers: dict[int, float]
    steps: int


@dataclass(frozen=True, eq=False)
class _Ahead:
    """What was worked out at once: `steps` of a step may be made from then on, in several trains,
    as long as nobody else has changed what it was worked out from."""

    step: PreparedStep
    copies: _Copies
    schedule: Any
    steps: int


def may_be_foretold(job: Job) -> bool:
    """Whether the job's schedulers are such as can be worked out ahead."""
    members = schedulers_in(job.scheduler)
    return bool(members) and all(map(_runs_torchs_code, members))


def _runs_torchs_code(scheduler: Any) -> bool:
    """Whether nothing of the user's is in a scheduler, or in those that it consists of."""
    kind: Any = type(scheduler)
    if kind not in KNOWN:
        return False
    own = vars(scheduler)
    if any(name in own for name in _METHODS) or own.get("_scale_fn_custom") is not None:
        return False
    codes = (getattr(getattr(kind, name), "__code__", None) for name in _METHODS)
    if not all(code is not None and is_trusted_code(code) for code in codes):
        return False
    return all(map(_runs_torchs_code, own.get("_schedulers", ())))


class Foreteller:
    """Works out one job's schedulers ahead."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._ahead: _Ahead | None = None
        self._numbers: _Comparisons | None = None  # of the step last asked for

    def foretell(self, step: PreparedStep, begun: int) -> Foretold | None:
        """What the schedulers do after each of the next steps.

        Args:
            step: the captured step, made again and again.
            begun: steps of the job so far.

        Returns:
            None where nothing is known, or the step is not right for the hyperparameters.
        """
        try:
            ahead = self._ahead
            if ahead is None or ahead.step is not step or not self._still_holds(ahead):
                ahead = self._ahead = self._work_out(step, self._most(begun))
        except _UnforeseenError:
            ahead = self._ahead = None
        if ahead is None:
            return None
        values = hyperparameters(self._job.optimizer)
        registers = {register: values[key] for key, register in step.compiled.registers.items()}  # type: ignore[index]
        # What somebody writes from here on does not hold when the first step is to be made.
        steps = ahead.steps - ahead.schedule.done
        return Foretold(ahead.schedule, registers, steps) if ahead.schedule.holds() else None

    def _still_holds(self, ahead: _Ahead) -> bool:
        left = ahead.steps > ahead.schedule.done
        return left and ahead.schedule.holds() and ahead.copies.are_of(self._job)

    def _most(self, begun: int) -> int:
        """How many steps are worked out after so many: as many as are to come, or were made."""
        total = self._job.total_steps
        to_come = max(begun, _AT_FIRST) if total is None else max(total - begun, 1)
        return min(to_come, _AT_ONCE)

    def _work_out(self, step: PreparedStep, most: int) -> _Ahead | None:
        assert step.optimizer is not None
        copies = _Copies(self._job)
        values = hyperparameters(copies.optimizer)  # type: ignore[arg-type]
        is_known = same_hyperparameters(step.valid_values, values)
        if not (is_known or step.optimizer.valid_for(values)):
            return None
        rows, steps = self._rows(copies, step, values, most)
        schedule = _C.Schedule(copies.places, _MISSING, copies.whole, rows)
        return _Ahead(step, copies, schedule, steps)

    def _rows(
        self, copies: _Copies, step: PreparedStep, values: dict[HyperKey, Any], most: int
    ) -> tuple[list[Any], int]:
        """What each step is followed by, and how many steps may be made."""
        if self._numbers is None or self._numbers.step is not step:
            self._numbers = _Comparisons(step)
        known = step.compiled.registers
        rows: list[Any] = []
        while len(rows) < most:
            try:
                written, numbers = copies.step()
            except Exception:  # the scheduler itself is to raise it, or to warn
                return rows, len(rows) + 1
            values.update(numbers)
            registers = [(known[key], value) for key, value in numbers.items() if key in known]
            rows.append((written, registers))
            if numbers and not self._numbers.allow(numbers, values):
                break
        copies.check()
        return rows, len(rows)


class _Comparisons:
    """Which hyperparameters a captured step is right for, asked of those that have changed."""

    def __init__(self, step: PreparedStep) -> None:
        assert step.optimizer is not None
        self.step = step
        self._trace: OptimizerTrace = step.optimizer
        self._guards = [(guard, _read_by(guard)) for guard in self._trace.guards]

    def allow(self, changed: Mapping[HyperKey, Any], values: Mapping[HyperKey, Any]) -> bool:
        fixed = self._trace.fixed
        fits = all(
            same_value(fixed[key], value) if key in fixed else traceable(value)
            for key, value in changed.items()
        )
        asked = (guard for guard, keys in self._guards if not keys.isdisjoint(changed))
        return fits and all(holds(guard, values) for guard in asked)


def _read_by(guard: Any) -> frozenset[HyperKey]:
    found = [*leaves(guard.left), *leaves(guard.right)]
    return frozenset(key for kind, key in found if kind == "hyper")


class _Optimizer:
    """What a scheduler's copy needs of an optimizer. It has no `step`: a scheduler that asks for it
    looks whether to warn."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self.param_groups = groups


class _Space:
    """A dictionary that is written to, and its copy."""

    def __init__(self, real: dict[str, Any], copy: dict[str, Any], group: int | None) -> None:
        self.real = real
        self.copy = copy
        self.group = group  # its number, where it is one
        self.numbers: dict[str, int] = {}  # of places
        self._seen = dict(copy)
        self._first = dict(copy)

    def changes(self) -> list[tuple[str, Any]]:
        """What is written since this was last asked."""
        seen, now = self._seen, self.copy
        if self.group is None:
            found = [each for each in now.items() if seen.get(each[0], _MISSING) is not each[1]]
        else:
            found = [(key, now[key]) for key in self.numbers if now[key] is not seen[key]]
        seen.update(found)
        return found

    @property
    def is_known(self) -> bool:
        """Whether nothing was written but at the places that are known."""
        rest = self.copy.keys() - self.numbers.keys()
        return self._first.keys() <= self.copy.keys() and all(
            self._first.get(key, _MISSING) is self.copy[key] for key in rest
        )


class _Copies:
    """Copies of a job's schedulers, and of the groups that they write to.

    Attributes:
        optimizer: what stands for the job's.
        places: where the schedulers may write, with what is there, for `_C.Schedule`.
        whole: the dictionaries all of whose entries are among them.
    """

    def __init__(self, job: Job) -> None:
        """Raises _UnforeseenError where they have something that is not known."""
        self._real = job.optimizer
        if vars(job.optimizer).get("_opt_called") is not True or not _torch_is_as_known():
            raise _UnforeseenError
        self._groups = list(job.optimizer.param_groups)
        self._schedulers = schedulers_in(job.scheduler)
        self._contents: list[tuple[Any, str]] = []  # what could be written to in place
        self.places: list[tuple[dict[str, Any], str, Any]] = []
        self.whole: list[dict[str, Any]] = []
        self._spaces: list[_Space] = []
        self._copied: dict[int, Any] = {}
        self.optimizer = _Optimizer([self._group(*each) for each in enumerate(self._groups)])
        self._members = [self._scheduler(each) for each in self._schedulers]

    def are_of(self, job: Job) -> bool:
        """Whether the job's objects are still those, and hold the same but for what the places
        hold."""
        groups, members = job.optimizer.param_groups, schedulers_in(job.scheduler)
        same = len(groups) == len(self._groups) and len(members) == len(self._schedulers)
        return (
            same
            and job.optimizer is self._real
            and all(map(operator.is_, groups, self._groups))
            and all(map(operator.is_, members, self._schedulers))
            and all(repr(held) == told for held, told in self._contents)
            and _torch_is_as_known()
        )

    def check(self) -> None:
        """Raises _UnforeseenError where something else was written than what is known."""
        if not all(space.is_known for space in self._spaces):
            raise _UnforeseenError

    def step(self) -> tuple[list[tuple[int, Any]], dict[HyperKey, float]]:
        """Steps the copies: what they write, by the numbers of places, and the hyperparameters
        among it.

        Raises:
            Whatever a scheduler raises; and where it does something that is not known.
        """
        if not all(map(_is_quiet, self._members)):
            raise _UnforeseenError
        for member in self._members:
            member.step()
        written: list[tuple[int, Any]] = []
        numbers: dict[HyperKey, float] = {}
        for space in self._spaces:
            known, group = space.numbers, space.group
            for key, value in space.changes():
                if key not in known:
                    self._add_unforeseen(space, key)
                written.append((known[key], value))
                if group is not None:
                    numbers.update(_numbers(group, key, value))
        return written, numbers

    def _add_unforeseen(self, space: _Space, key: str) -> None:
        if space.group is not None:
            raise _UnforeseenError
        self._add_place(space, key, _MISSING)

    def _add_place(self, space: _Space, key: str, value: Any) -> None:
        space.numbers[key] = len(self.places)
        self.places.append((space.real, key, value))

    def _group(self, number: int, group: dict[str, Any]) -> dict[str, Any]:
        copy = dict(group)
        space = _Space(group, copy, number)
        for key in WRITTEN & copy.keys():
            if type(copy[key]) is list or not _is_plain(copy[key]):  # could be written to in place
                raise _UnforeseenError
            self._add_place(space, key, copy[key])
        self._spaces.append(space)
        return copy

    def _scheduler(self, scheduler: Any) -> Any:
        if id(scheduler) in self._copied:
            return self._copied[id(scheduler)]
        kind, real = type(scheduler), vars(scheduler)
        held = dict(real)
        if kind not in KNOWN or held.get("optimizer") is not self._real:
            raise _UnforeseenError
        copy = self._copied[id(scheduler)] = object.__new__(kind)
        own = vars(copy)
        for key, value in held.items():
            own[key] = self._attribute(key, value)
        space = _Space(real, own, None)
        for key, value in held.items():
            self._add_place(space, key, value)
        self.whole.append(real)
        self._spaces.append(space)
        return copy

    def _attribute(self, key: str, value: Any) -> Any:
        if key == "optimizer":
            return self.optimizer
        if key == "_schedulers":
            self._contents.append((value, repr(value)))
            return [self._scheduler(each) for each in value]
        if not (_is_plain(value) or (key == "_scale_fn_ref" and _is_known_scale(value))):
            raise _UnforeseenError
        if not isinstance(value, (list, dict, tuple)):
            return value
        if key != "_last_lr":
            self._contents.append((value, repr(value)))
        return type(value)(value)


def _numbers(group: int, key: str, value: Any) -> dict[HyperKey, float]:
    if type(value) is float:
        return {(group, key): value}
    if not numbers_of(value):
        raise _UnforeseenError
    return {(group, key, place): number for place, number in enumerate(value)}


def _is_plain(value: Any) -> bool:
    if type(value) in (dict, Counter):
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def _is_known_scale(function: Any) -> bool:
    """Whether it is one of torch's own scales of a `CyclicLR`."""
    code = getattr(getattr(function, "func", function), "__code__", None)
    plain = _is_plain(getattr(function, "args", ())) and not getattr(function, "keywords", None)
    return code is not None and is_trusted_code(code) and plain


def _is_quiet(scheduler: Any) -> bool:
    """Whether its next step is sure to say nothing: where one scheduler follows another, some
    releases of torch warn of their own call."""
    members = getattr(scheduler, "_schedulers", ())
    turns = getattr(scheduler, "_milestones", ())
    return all(map(_is_quiet, members)) and not (turns and scheduler.last_epoch + 1 in turns)


class _Torch:
    """Whether torch's code is what it was when this was first asked."""

    def __init__(self) -> None:
        kinds = {kind for known in KNOWN for kind in known.__mro__ if kind is not object}
        self.is_own = all(map(is_trusted_class, kinds))
        self.guards = _C.Guards()
        for kind in kinds:
            functions = [each for _, each in self.guards.type(kind, None, CLASS_NOISE)]
            for function in functions:
                function = getattr(function, "__func__", function)
                if hasattr(function, "__code__"):
                    self.is_own &= is_trusted_code(function.__code__)
                    self.guards.function(function)
        self.guards.mapping(vars(lr_scheduler), frozenset({"__warningregistry__"}))
        self.guards.mapping(vars(math), None)


_torch: _Torch | None = None


def _torch_is_as_known() -> bool:
    global _torch
    if _torch is None:
        _torch = _Torch()
    return _torch.is_own and bool(_torch.guards.holds())
