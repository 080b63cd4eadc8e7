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
from waterflow.account.changeable import keys_of, moved_by_use
from waterflow.account.code_names import code_names
from waterflow.account.purity import undisturbed
from waterflow.account.trust import Packages, is_of_trusted_classes
from waterflow.account.walk import Limits
from waterflow.capture.plain_python import Met, met_by_plain
from waterflow.capture.python_kind import code_of, kind_of_python, rough_kind
from waterflow.capture.reach import Reach, Shared, Training
from waterflow.capture.torchs_calls import has_hooks
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
#: For so many kinds of jobs it is remembered how far a look went.
_MOST_KINDS = 256
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
        trained: what its training changes by itself, whatever its Python does.
        seen: what its Python reaches, its callback included, but for its own model.
        changed: what its Python may change, but for lists to which it only adds, and `called`.
        reached: what its steps reach.
        noted: those lists.
        called: what of packages it calls, which may change by that.
        look: the number of this look at a job.
    """

    trained: frozenset[Hashable]
    seen: frozenset[Hashable]
    changed: frozenset[Hashable]
    reached: frozenset[Hashable]
    noted: frozenset[Hashable] = frozenset()
    called: frozenset[Hashable] = frozenset()
    look: int = 0

    @classmethod
    def of(cls, reach: Reach) -> _Marks:
        """Of what is reached now."""
        changed, called = reach.changed - reach.noted - reach.called_only, reach.called_only
        training = reach.trained, reach.seen
        return cls(*training, changed, reach.reached, reach.noted, called, next(_looks))

    @classmethod
    def of_plain(cls, job: Job, steps: Met, callback: Met) -> _Marks:
        """Of a job that changes nothing but what it trains, what is moved by use, and what is in
        some containers; by what its code reaches."""
        training = Training(job)
        both = steps, callback
        met = [frozenset(key for one in each.objects for key in keys_of(one)) for each in both]
        moved = (one for each in both for value in each.objects for one in moved_by_use(value))
        both_changed = itertools.chain(moved, steps.changed, callback.changed)
        changed = frozenset(key for one in both_changed for key in keys_of(one)) - training.own
        seen = met[0].union(met[1]) - training.own
        return cls(frozenset(training.changed), seen, changed, met[0])

    def have(self, key: Hashable, other: _Marks) -> bool:
        """Whether one may change an object that the other's steps reach."""
        return (
            (key in self.changed and key in other.reached)
            or (key in other.changed and key in self.reached)
            or (key in self.called and key in other.called)
            or (key in self.trained and key in other.seen)
            or (key in other.trained and key in self.seen)
        )

    def may_meet(self, other: _Marks) -> bool:
        """Whether one may change what the other's steps reach."""
        return not (
            self.trained.isdisjoint(other.seen)
            and other.trained.isdisjoint(self.seen)
            and self.changed.isdisjoint(other.reached)
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
        one, two = self._plain, other._plain
        if one is not None and two is not None and not one.may_meet(two):  # hundreds, often
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

    @property
    def _copied(self) -> dict[str, Any]:
        """What the workers of its loader have copies of."""
        data = self._job.data
        return {"data": data} if type(data) is DataLoader and data.num_workers else {}

    @functools.cached_property
    def _plain(self) -> _Marks | None:
        """Its marks as far as they are told at once; None: they are not."""
        steps = met_by_plain((*self._roots.values(), *self._copied.values()))
        callback = None if steps is None else met_by_plain([self._job.on_step])
        if steps is None or callback is None:
            return None
        return _Marks.of_plain(self._job, steps, callback)

    @functools.cached_property
    def _kind(self) -> Hashable:
        return kind_of_python({**self._roots, "on_step": self._job.on_step})

    @functools.cached_property
    def _marks(self) -> _Marks | None:
        reach = self._reach = self._look()
        return None if reach is None else _Marks.of(reach)

    def _look(self) -> Reach | None:
        """What its Python reaches now; None where that is too much."""
        kind = rough_kind(self._roots)
        objects = _MOST_OBJECTS + _OF_A_MODULE * len(self._modules)
        limits = Limits(objects, _MOST_FUNCTIONS, _MOST_ITEMS)
        for packages in (Packages.BUT_REPORTERS, Packages.NONE)[_TOO_MUCH.get(kind, 0) :]:
            roots = self._roots, {"on_step": self._job.on_step}, self._copied
            found = [_account_of(each, packages, limits) for each in roots]
            accounts = [account for account in found if account is not None]
            if len(accounts) == len(roots):
                return Reach(self._job, *accounts)
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
    own = has_hooks(optimizer) or "step" in vars(optimizer)
    return own or not is_of_trusted_classes(optimizer)


def _is_of_batches(data: Any) -> bool:
    """Whether none of a job's Python makes its batches, but what is its own, or everybody's."""
    return type(data) in (list, tuple) or isinstance(data, NumberedEpochs)


def _mode_counts(module: nn.Module) -> bool:
    """Whether a module in training mode does something else than in the other."""
    if not module.training or getattr(module, "dropout", None) == 0:
        return False
    code = code_of(type(module).forward)
    return code is None or "training" in code_names(code).names
