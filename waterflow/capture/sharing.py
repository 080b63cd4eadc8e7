"""Whether two jobs have a Python object in common that one of them may change while it trains: a
metric that each evaluation resets, a hook's or a criterion's notes, a buffer of a collate function.

What each would find there depends on who comes when, so such jobs train one after another, as in
the plain loop. What callbacks change and only callbacks see is theirs: that is how trials are
compared.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from waterflow.account.account import Account
from waterflow.account.code_names import code_names
from waterflow.account.purity import undisturbed
from waterflow.account.trust import Packages, is_of_trusted_classes
from waterflow.account.walk import Limits
from waterflow.capture.plain_python import is_plain
from waterflow.capture.python_kind import code_of, kind_of_python, rough_kind
from waterflow.capture.reach import Called, Reach, Shared
from waterflow.job.epochs import NumberedEpochs
from waterflow.job.job import Job
from waterflow.job.several import optimizers_in

#: Where a job reaches more objects, and so many for each of its modules, no package is looked
#: into: with large libraries among them a walk takes seconds.
_MOST_OBJECTS, _OF_A_MODULE = 3_000, 50
#: Nor where it reaches so many functions beside torch's.
_MOST_FUNCTIONS = 400
#: Containers of more items are data most often: only that they are there is looked at.
_MOST_ITEMS = 512
#: For so many kinds of jobs it is remembered whether they change anything.
_MOST_KINDS = 256
_KNOWN: dict[Hashable, _Known] = {}
#: How many looks were too much for kinds of jobs, roughly: of two, the second looks into no
#: package.
_TOO_MUCH: dict[Hashable, int] = {}
#: So many objects that jobs have in common are remembered.
_MOST_COMMON = 64
_COMMON: list[_Common] = []
_looks = itertools.count()
#: Python that steps run, by the names of a job's arguments; `on_step` is looked at beside it.
_STEPS = ("loss", "step", "evaluate", "scheduler")
_SWITCH_MODES = frozenset({"eval", "train"})


class _Known(NamedTuple):
    """What is known of jobs of one kind.

    Attributes:
        changes: whether their Python changes anything that it has not made.
        called: what it calls by name.
    """

    changes: bool
    called: list[Called]

    def holds(self) -> bool:
        """Whether it would call the same now."""
        return all(each.holds() for each in self.called)


class _Common(NamedTuple):
    """An object that two jobs had in common, and that one of them might change: a library's own
    state is met by one pair after another.

    Attributes:
        kinds: of the two jobs.
        value: the object.
        reason: what was said of it.
        look: the number of the earlier of the two looks that found it.
    """

    kinds: frozenset[Hashable]
    value: weakref.ref[Any]
    reason: str
    look: int

    def is_of(self, kinds: frozenset[Hashable], one: _Marks, two: _Marks) -> bool:
        """Whether two jobs of the same kinds have it in common, too. It has been there since they
        were looked at, so that it is what they have by its identity."""
        value = self.value()
        since = self.look <= min(one.look, two.look)
        return value is not None and since and kinds == self.kinds and one.have(id(value), two)


class _Marks(NamedTuple):
    """What one job's Python may change, and what its steps reach, by identities alone: objects that
    were met would live on otherwise, results of the latest step among them.

    Attributes:
        anything: whether its code may change anything that it has not made.
        changed: what of that there is, but for lists to which it only adds, and `called`.
        reached: what its steps reach.
        noted: those lists.
        called: what of packages it calls, which may change by that.
        look: the number of this look at a job.
    """

    anything: bool
    changed: frozenset[Hashable]
    reached: frozenset[Hashable]
    noted: frozenset[Hashable]
    called: frozenset[Hashable]
    look: int

    @classmethod
    def of(cls, reach: Reach) -> _Marks:
        """Of what is reached now."""
        changed, called = reach.changed - reach.noted, reach.called_only
        anything = reach.changes_anything
        return cls(anything, changed - called, reach.reached, reach.noted, called, next(_looks))

    def have(self, key: Hashable, other: _Marks) -> bool:
        """Whether one may change an object that the other's steps reach."""
        return (
            (key in self.changed and key in other.reached)
            or (key in other.changed and key in self.reached)
            or (key in self.called and key in other.called)
        )

    def may_meet(self, other: _Marks) -> bool:
        """Whether one may change what the other's steps reach."""
        return not (
            self.changed.isdisjoint(other.reached)
            and self.called.isdisjoint(other.called)
            and other.changed.isdisjoint(self.reached)
            and (self.noted - other.noted).isdisjoint(other.reached)
            and (other.noted - self.noted).isdisjoint(self.reached)
        )


class Sharing:
    """What one job may have in common with others."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._reach: Reach | None = None  # of the look at a pair under way

    def reason(self, other: Sharing) -> str | None:
        """Why the two may not train side by side: what one of them may change; None: they may."""
        try:
            return self._common_mode(other) or self._changing(other)
        except Exception as error:  # two jobs' affair, and nobody else's
            return f"Python that could not be looked into ({type(error).__name__}: {error})"
        finally:
            self._reach = other._reach = None  # what was met is not to live on

    def _changing(self, other: Sharing) -> str | None:
        if not (self._changes_anything or other._changes_anything):
            return None
        one, two = self._marks, other._marks
        if one is None or two is None:  # more than can be looked at
            return None
        if not one.may_meet(two):
            return None
        kinds = frozenset((self._kind, other._kind))
        common = (each.reason for each in _COMMON if each.is_of(kinds, one, two))
        return next(common, None) or self._reason_now(other, kinds)

    def _reason_now(self, other: Sharing, kinds: frozenset[Hashable]) -> str | None:
        """The same from what both reach now: who is gone has left his identity to others."""
        one, two = self._reach or self._look(), other._reach or other._look()
        if one is None or two is None:
            return None
        marks = self._marks, other._marks = _Marks.of(one), _Marks.of(two)
        found = one.may_change(two) or two.may_change(one)
        if found is None:
            return None
        if None not in kinds and found.value is not None:
            _note_common(kinds, found, min(each.look for each in marks))
        return found.reason

    @functools.cached_property
    def _roots(self) -> dict[str, Any]:
        job = self._job
        data = None if _is_of_batches(job.data) else job.data
        if type(data) is DataLoader and data.num_workers:  # which work on copies of all else
            samplers = data.sampler, data.batch_sampler
            data = [one for one in samplers if not is_of_trusted_classes(one)]
        roots = {name: getattr(job, name) for name in _STEPS}
        optimizers = [one for one in optimizers_in(job.optimizer) if _has_users_code(one)]
        return {"model": job.root, **roots, "data": data, "optimizer": optimizers}

    @functools.cached_property
    def _changes_anything(self) -> bool:
        """Whether its Python may change anything that is not made by it; one look for all jobs that
        are made of the same functions and classes, as long as these call the same."""
        if is_plain(self._with_callback.values()):
            return False
        known = _KNOWN.get(self._kind)
        if known is not None and known.holds():
            return known.changes
        return self._marks is not None and self._marks.anything

    @property
    def _with_callback(self) -> dict[str, Any]:
        return {**self._roots, "on_step": self._job.on_step}

    @functools.cached_property
    def _kind(self) -> Hashable:
        return kind_of_python(self._with_callback)

    @functools.cached_property
    def _marks(self) -> _Marks | None:
        reach = self._reach = self._look()
        if reach is not None and self._kind is not None:
            if len(_KNOWN) >= _MOST_KINDS:
                _KNOWN.clear()
            _KNOWN[self._kind] = _Known(reach.changes_anything, reach.called)
        return None if reach is None else _Marks.of(reach)

    def _look(self) -> Reach | None:
        """What its Python reaches now; None where that is too much."""
        kind = rough_kind(self._roots)
        objects = _MOST_OBJECTS + _OF_A_MODULE * len(self._modules)
        limits = Limits(objects, _MOST_FUNCTIONS, _MOST_ITEMS)
        for packages in (Packages.BUT_REPORTERS, Packages.NONE)[_TOO_MUCH.get(kind, 0) :]:
            steps = _account_of(self._roots, packages, limits)
            callback = _account_of({"on_step": self._job.on_step}, packages, limits)
            if not (steps is None or callback is None):
                return Reach(self._job, steps, callback)
            if kind in _TOO_MUCH or len(_TOO_MUCH) < _MOST_KINDS:
                _TOO_MUCH[kind] = _TOO_MUCH.get(kind, 0) + 1
        return None

    @functools.cached_property
    def _modules(self) -> dict[int, nn.Module]:
        return {id(module): module for module in self._job.root.modules()}

    def _common_mode(self, other: Sharing) -> str | None:
        """A module of both whose mode counts, where one of the two may switch it: an evaluation
        that makes it draw no dropout would do so in the other's steps."""
        if self._modules.keys().isdisjoint(other._modules.keys()):  # of hundreds, nearly all
            return None
        common = self._modules.keys() & other._modules.keys()
        counts = [one for key in common if _mode_counts(one := self._modules[key])]
        if not counts or not (self._switches_modes or other._switches_modes):
            return None
        return f"the mode (training or not) of a {type(counts[0]).__name__} that both have"

    @property
    def _switches_modes(self) -> bool:
        job = self._job
        functions = (job.loss, job.step, job.on_step)
        codes = [code for one in functions if (code := code_of(one)) is not None]
        named = frozenset[str]().union(*(code_names(code).names for code in codes))
        return job.evaluate is not None or not named.isdisjoint(_SWITCH_MODES)


def _note_common(kinds: frozenset[Hashable], found: Shared, look: int) -> None:
    """Remembers what two jobs have in common, where that can be told from others later."""
    if isinstance(found.value, np.ndarray):  # numpy resizes none to which there are weak references
        return
    try:
        value = weakref.ref(found.value)
    except TypeError:
        return
    _COMMON.append(_Common(kinds, value, found.reason, look))
    del _COMMON[:-_MOST_COMMON]


def _account_of(roots: Mapping[str, Any], packages: Packages, limits: Limits) -> Account | None:
    """What these reach; where that is too much, as code computes names of attributes in a process
    with large libraries, what they reach by names that can be read; None: that is, too."""
    for computed in (True, False):
        try:
            with undisturbed():
                found = Account.take(
                    roots,
                    executed_only=True,
                    packages=packages,
                    limits=limits,
                    computed=computed,
                )
        except Exception:  # objects that refuse to be looked at, or change meanwhile
            continue
        if found.is_whole:
            return found
    return None


def _has_users_code(optimizer: torch.optim.Optimizer) -> bool:
    own = vars(optimizer)
    hooks = any(value for name, value in own.items() if "hooks" in name)
    return hooks or "step" in own or not is_of_trusted_classes(optimizer)


def _is_of_batches(data: Any) -> bool:
    """Whether none of a job's Python makes its batches, but what is its own, or everybody's."""
    return type(data) in (list, tuple) or isinstance(data, NumberedEpochs)


def _mode_counts(module: nn.Module) -> bool:
    """Whether a module in training mode does something else than in the other."""
    if not module.training or getattr(module, "dropout", None) == 0:
        return False
    code = code_of(type(module).forward)
    return code is None or "training" in code_names(code).names
