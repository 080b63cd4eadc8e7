"""What a captured step takes for granted, looked at before every step.

A captured step is the user's Python as it was at one moment. It stays right as long as all that
this Python can read is what it was: objects, variables and code (`waterflow.account`), the job's
fields, the process's switches. The first look is wide: everything that the code could reach. The
step that checks a new graph against the eager loop runs under observation; from then on only what
its code can really read counts, so that a callback's own lists or a trainer's counters disturb
nobody.
"""

from __future__ import annotations

import functools
import math
import os
import re
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from types import CodeType
from typing import Any
from weakref import ref

import torch

from waterflow.account.account import Account
from waterflow.account.code_names import code_names, names_in
from waterflow.account.code_walk import Late
from waterflow.account.purity import impure_calls, may_touch_the_world, undisturbed
from waterflow.account.structure import Structure
from waterflow.account.trust import (
    is_generated_code,
    is_of_trusted_classes,
    is_own_class,
    is_trusted_code,
)
from waterflow.account.walk import Limits
from waterflow.allocator_ext import _C
from waterflow.capture.caller import CallerContext
from waterflow.capture.identities import told_apart
from waterflow.capture.opaque import COMPILED
from waterflow.capture.torchs_calls import watch_calls
from waterflow.capture.tracing import users_line
from waterflow.common import switches
from waterflow.job.job import Job
from waterflow.job.optimizer_state import (
    Layout,
    hyperparameter_places,
    live_places,
    trained_parameters,
)
from waterflow.job.rules import StepRules
from waterflow.job.several import optimizers_in

#: How far a first look goes: beyond, what a step really reads is found by trial.
_FIRST_LOOK = Limits(objects=20_000)


@dataclass(frozen=True)
class Seen:
    """What an eager step of the job has executed.

    Attributes:
        codes: its code.
        names: the attributes that this code can read; None if it can read any.
    """

    codes: frozenset[CodeType]
    names: frozenset[str] | None

    @functools.cached_property
    def users_names(self) -> frozenset[str] | None:
        """The names in code of the user's; None: any."""
        if self.names is None:
            return None
        codes = [code for code in self.codes if not is_trusted_code(code)]
        return frozenset[str]().union(*(code_names(code).names for code in codes))

    @functools.cached_property
    def reads_groups(self) -> bool:
        """Whether it may read hyperparameters through an optimizer, apart from its step."""
        return any(map(_reads_groups, self.codes))

    @functools.cached_property
    def reads_defaults(self) -> bool:
        """Whether code of the user's may look at an optimizer's defaults."""
        return _reads_defaults(self.codes)

    @functools.cached_property
    def asks_for_switches(self) -> bool:
        """Whether it asks torch for its switches."""
        return any(map(switches.are_asked_by, self.codes))

    def __or__(self, other: Seen) -> Seen:
        """What two eager steps have executed."""
        any_name = self.names is None or other.names is None
        names = None if any_name else frozenset((*self.names, *other.names))  # type: ignore[misc]
        return Seen(self.codes | other.codes, names)

    @classmethod
    def by(cls, observer: Any) -> Seen:
        """What an observer (`purity.observer`) has seen."""
        codes, calls = observer.codes(), observer.calls()
        return cls(frozenset(codes), names_in(codes, calls))


@dataclass(frozen=True)
class JobStructure:
    """What a step takes for granted, in a form that other jobs can be compared with.

    Attributes:
        key: equal for two jobs whose steps are traced to the same, while both are kept.
        structure: of what the step can read.
    """

    key: tuple[Any, ...]
    structure: Structure

    def without_tensors(self) -> JobStructure:
        """The same, to be kept after the job has gone."""
        return JobStructure(self.key, self.structure.without_tensors())


class FoundGradients:
    """The gradients that a step finds: one of the user's own those of its parameters; any those of
    tensors that it does not train, where its Python asks for gradients.

    They are known weakly: whether somebody has them is asked elsewhere.

    Attributes:
        are_foreign: whether there are such tensors.
        are_there_of_others: whether they have gradients, which their twins in a trace have not.
    """

    def __init__(self, job: Job) -> None:
        trained = trained_parameters(job.optimizer)
        own = [] if job.step is None else [*job.root.parameters(), *trained]
        self._known = set(map(id, (*own, *trained)))
        self._own = self._found = _with_gradients(own)
        self.are_foreign = False
        self.are_there_of_others = False

    def read_by(self, seen: Seen, account: Account) -> None:
        """From here on of what a step reads that executes what was seen, too."""
        names = seen.users_names
        others = account.instances(torch.Tensor) if names is None or "grad" in names else ()
        leaves = [one for one in others if id(one) not in self._known and one.is_leaf]
        foreign = [one for one in leaves if one.requires_grad or one.grad is not None]
        self.are_foreign = bool(foreign)
        self.are_there_of_others = any(one.grad is not None for one in foreign)
        self._found = self._own + _with_gradients(foreign)

    def layouts(self) -> tuple[Layout | None, ...]:
        """What a trace sees of them."""
        grads = (leaf.grad for leaf, _ in self._found)
        return tuple(None if grad is None else Layout.of(grad) for grad in grads)

    def are_there(self) -> bool:
        """Whether each parameter has the gradient that it had, or none as before."""
        for leaf, known in self._found:
            now = leaf.grad
            if now is not (None if known is None else known()) or (now is None) != (known is None):
                return False
        return True


def _with_gradients(
    leaves: Iterable[torch.Tensor],
) -> list[tuple[torch.Tensor, ref[torch.Tensor] | None]]:
    return [(leaf, None if leaf.grad is None else ref(leaf.grad)) for leaf in leaves]


class Assumptions:
    """What one captured step of a job takes for granted."""

    def __init__(
        self,
        job: Job,
        caller: CallerContext,
        *,
        with_optimizer: bool = True,
        seen: Seen | None = None,
        patience: float | None = None,
        names: frozenset[str] | None = None,
    ) -> None:
        """Takes the state as it is now.

        Args:
            job: whose step it is.
            caller: the context of the job's Python.
            with_optimizer: whether the optimizer's step is part of the capture.
            seen: what eager steps have executed, if any were observed: then only this counts.
            patience: None where no step can be observed first. Where one can, a look that would be
                very wide, or take more than so many seconds, only tells of a risk.
            names: without `seen`, the attributes that counted for another job: where the
                structures turn out to be equal, its code is this job's code, too.
        """
        self._job = job
        self._patience = patience
        self._caller = caller
        self._with_optimizer = with_optimizer
        self._fields = _fields(job)
        self._switches = switches.now()
        self._own = _C.Guards()
        for name in _FIELDS:
            self._own.slot(job, Job.__dict__[name])
        switches.watch(self._own)
        self._calls = watch_calls(job)
        self._gradients = FoundGradients(job)
        self.seen = seen
        self._account = self._take(seen, names)
        self._look = self._look_now()

    def narrowed(self, seen: Seen) -> Assumptions:
        """What a step takes for granted that executes no more than was seen."""
        return Assumptions(self._job, self._caller, with_optimizer=self._with_optimizer, seen=seen)

    def taken_anew(self) -> Assumptions | None:
        """The same of the state as it is now; None where no step was observed, so that it would
        take a wide look."""
        return None if self.seen is None else self.narrowed(self.seen)

    @property
    def names(self) -> frozenset[str] | None:
        """The attributes that count; None: any."""
        return self._account.names

    @property
    def account(self) -> Account:
        """All Python state that the step can read; another one after `narrow`."""
        return self._account

    @property
    def guards(self) -> list[Any]:
        """What the fast look looks at, in the extension's form; another list after `narrow`."""
        return [self._own, self._calls, self._asked, *self._account.guards]

    def _look_now(self) -> Any:
        """The fast look at the account, and at what only some steps ask for."""
        self._asked = _C.Guards()
        if self.seen is not None:
            if self.seen.asks_for_switches:
                switches.watch_all(self._asked, self._switches)
            self._gradients.read_by(self.seen, self._account)
        if self._job.step is not None or self._gradients.are_foreign:
            self._asked.probe(FoundGradients.are_there, self._gradients, True)
        return self._caller.look_at(self.guards)

    def hold(self) -> bool:
        """Whether everything is as it was: the fast look, before each step."""
        return self._look.holds() or self.difference() is None

    def difference(self) -> str | None:
        """What is not as it was, in a user's words."""
        for name, now, then in zip(_FIELDS, _fields(self._job), self._fields, strict=True):
            if now is not then:
                return f"the job's {name}"
        if not self._calls.holds():
            return "a function of torch's that its steps call"
        if switches.now() != self._switches:
            return "a process-wide setting of torch"
        if not self._gradients.are_there():
            return "the gradients that are there between two steps"
        return self._caller.look(self._account.difference)

    def structure(self, portable: bool = False) -> JobStructure | None:
        """For comparisons with other jobs; None where it has something that has none.

        Live hyperparameters do not count, nor their copies among the defaults, which no step of
        torch's own optimizers computes with.

        Args:
            portable: whether with those of other processes, too.
        """
        job, context = self._job, self._caller.kind
        if context is None:
            return None
        members = optimizers_in(job.optimizer)
        seen, codes = self.seen, self._account.own_codes
        reads = _reads_defaults(codes) if seen is None else seen.reads_defaults
        own = all(map(is_of_trusted_classes, members)) and not reads
        aside = (
            {id(one.defaults) for one in members if self._is_its_own(one.defaults)}
            if own
            else set()
        )
        roots = [*self._roots().values(), tuple(trained_parameters(job.optimizer))]
        try:
            found = Structure(self._account, roots, aside, portable)
        except Exception:  # no structure, or objects that refuse to be looked at
            return None
        gradients = self._gradients.layouts()
        key = found.digest, self._switches, job.rules, context, self._with_optimizer, gradients
        return JobStructure(key, found)

    def _is_its_own(self, defaults: dict[str, Any]) -> bool:
        """Whether a dictionary was met as an optimizer's attribute first, which is walked last."""
        trail = self._account.trail_of(defaults)
        return trail is None or trail.endswith(".defaults")

    def restore(self) -> list[str]:
        """Puts the state back, after a trace has run the user's code; returns what could not be."""
        switches.put_back(self._switches)
        if self._caller.look(self._account.holds):
            return []
        return self._caller.look(self._account.restore)

    def risk(self) -> str | None:
        """What a trace may move for good: then observed steps have to show first that they do not.

        A trace runs the user's code once more than the loop; what an account cannot put back
        (iterators, files, objects of unknown extensions) would be left moved.
        """
        if self._account.irrevocable:
            return self._account.irrevocable[0]
        if self._account.unwalkable:
            return self._account.unwalkable[0][0]
        return None if self.seen is not None else may_touch_the_world(self._account)

    def narrow(self, observer: Any) -> str | None:
        """Looks from now on only at what the observed step can read.

        Args:
            observer: what has watched one eager step (`purity.observer`).

        Returns:
            Why the step cannot be replayed, None where it can: a call whose result may change, or
            state that cannot be looked at.
        """
        codes, calls = observer.codes(), observer.calls()
        if any(map(_is_compilers, codes)):
            return COMPILED
        impurities = impure_calls(calls, codes)
        if impurities:
            first = impurities[0]
            return f"the step calls {first.name}, which {first.why} ({first.file}:{first.line})"
        if self.seen is None or not self.seen.codes.issuperset(codes):
            self.seen = Seen.by(observer)
            self._account = self._take(self.seen)
            self._look = self._look_now()
        return self._hidden(codes)

    def renew(self) -> None:
        """The optimizer is traced anew, for hyperparameters as they are now: those that can be
        changed where they are count from here on."""
        if self._with_optimizer and self._followed != hyperparameter_places(self._job.optimizer):
            former = self._account, self._look
            names = self._account.names if self.seen is None else None
            self._account = self._take(self.seen, names)
            self._look = self._look_now()
            if not former[1].holds():
                self._account, self._look = former

    def _hidden(self, executed: Collection[CodeType]) -> str | None:
        """What the step can read, or runs, that the account does not show."""
        if self._account.unwalkable:
            path, kind = self._account.unwalkable[0]
            return f"the step can read {path}, a {kind}, whose state cannot be followed"
        for code in set(executed) - self._account.codes:
            imported = code.co_name == "<module>"  # by the step
            if not (imported or is_trusted_code(code) or is_generated_code(code)):
                where = f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"
                return f"the step runs code that nothing it can read leads to ({where})"
        if self._job.step is None and self._gradients.are_there_of_others:
            where = users_line(None, self._job.function)
            return f"the step can read gradients of tensors that it does not train ({where})"
        return told_apart(self._job, self._account, executed)

    def _take(self, seen: Seen | None, names: frozenset[str] | None = None) -> Account:
        if seen is not None:
            return self._taken(seen, names, seen.reads_groups)
        account = self._taken(seen, names, reads_groups=False)
        # What a first check does not meet (a penalty that begins late) would share a trace that
        # has other trials' numbers.
        if any(map(_reads_groups, account.own_codes)):
            account = self._taken(seen, names, reads_groups=True)
        return account

    def _taken(
        self, seen: Seen | None, names: frozenset[str] | None, reads_groups: bool
    ) -> Account:
        roots, late = self._roots(), self._late(reads_groups)
        # No code of the user's is known to be executed before a first step was observed.
        users_names = frozenset[str]() if seen is None else seen.users_names
        skip = live_places(self._job.optimizer, users_names)
        for module in self._job.root.modules():
            if is_own_class(type(module)):  # a host's notes, which no step knows of
                skip[id(module)] = getattr(module, "unread_by_steps", set())

        def take() -> Account:
            if seen is None:
                patience = math.inf if self._patience is None else self._patience
                return Account.take(
                    *(roots, names, None, skip),
                    limits=_FIRST_LOOK._replace(until=time.thread_time() + patience),
                    unless_any=self._patience is not None,
                    late=late,
                )
            return Account.take(roots, seen.names, seen.codes, skip, late=late)

        with undisturbed():  # thousands of objects that stay would have all others looked through
            return self._caller.look(take)

    def _late(self, reads_groups: bool) -> Late:
        """Hyperparameters are live where the optimizer alone reads them: whatever else leads to
        them, code of the step computes with them, too, and has numbers in the trace."""
        optimizer = self._job.optimizer
        own = (optimizer, *optimizers_in(optimizer))
        aside = () if reads_groups else frozenset(map(id, own))
        self._followed = hyperparameter_places(optimizer)
        return Late(("optimizer",), aside, self._followed)

    def _roots(self) -> dict[str, Any]:
        what = "loss" if self._job.step is None else "step"
        roots: dict[str, Any] = {"model": self._job.root, what: self._job.function}
        if self._with_optimizer:
            roots["optimizer"] = self._job.optimizer
        return roots


_FIELDS = ("model", "optimizer", "loss", "step", *StepRules._fields)


def _fields(job: Job) -> tuple[Any, ...]:
    return job.model, job.optimizer, job.loss, job.step, *job.rules


_OF_COMPILER = os.path.join("torch", "_dynamo", "eval_frame.py")
#: What torch's optimizers do with their groups at each step, by their functions' names.
_OF_UPDATES = re.compile(r"step|zero_grad|_init_group|_\w+_graph_capture_health_check|wrapper")


def _is_compilers(code: CodeType) -> bool:
    """Whether it is run around what ``torch.compile`` has made."""
    return code.co_name == "compile_wrapper" and code.co_filename.endswith(_OF_COMPILER)


def _reads_defaults(codes: Iterable[CodeType]) -> bool:
    names = names_in([code for code in codes if not is_trusted_code(code)])
    return names is None or "defaults" in names


def _reads_groups(code: CodeType) -> bool:
    """Whether code may read hyperparameters through an optimizer, and is not part of its step."""
    is_torchs = is_trusted_code(code)
    if is_torchs and _OF_UPDATES.fullmatch(code.co_name):
        return False
    names = code_names(code).names if is_torchs else names_in([code])
    return names is None or "param_groups" in names
