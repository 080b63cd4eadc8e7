"""What a job's Python reaches, and what of that it may change."""

from __future__ import annotations

import builtins
import functools
import os
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from waterflow.account import places
from waterflow.account.account import Account
from waterflow.account.bytecode import nested_codes
from waterflow.account.changeable import (
    OF_THE_PROCESS,
    Way,
    changes_when_called,
    has_attribute,
    is_compiled,
    is_looked_after,
    is_queue,
    keys_of,
    may_be_changed,
    memory_of,
    moved_by_use,
)
from waterflow.account.changing_names import ADDING, TAKING, is_changing
from waterflow.account.class_parts import CONSTANTS, is_a, of_each_class
from waterflow.account.code_names import code_names
from waterflow.account.holders import (
    CONTAINERS,
    MAKERS,
    OF_CLASSES,
    Holders,
    attributes_of,
    cells_of,
    is_iterator,
    parts_of,
    within,
)
from waterflow.account.origins import Origin
from waterflow.account.probes import Memo
from waterflow.account.stores import Change, stores_of
from waterflow.account.trust import (
    Packages,
    is_own_class,
    is_package_class,
    is_trusted_class,
    is_trusted_code,
)
from waterflow.capture.plain_python import bound_to_be_changed, is_of_tensors
from waterflow.capture.python_kind import code_of
from waterflow.job.data_streams import generators_of
from waterflow.job.job import Job
from waterflow.job.optimizer_state import trained_parameters
from waterflow.job.several import optimizers_in, schedulers_in

#: Parameters of a job's functions that are its own objects, by their positions.
_GIVEN = {"loss": ("model", "batch"), "step": ("batch",), "evaluate": ("model",), "on_step": ("",)}
#: How objects of packages are changed by their own code, which is passed by.
_CALL = "call"
#: Names by which code reads the environment.
_ENVIRONMENT = frozenset({"environ", "getenv"})
#: So many objects are looked at for a job's loaders.
_MOST_BEHIND = 1_000


class Reach:
    """What a job's Python reaches, and what of that it may change.

    Attributes:
        steps: what its steps, evaluations and data reach.
    """

    def __init__(self, job: Job, steps: Account, callback: Account, copied: Account) -> None:
        """Takes what its steps reach, its callback, and workers of its loader, which change copies
        alone: of what is there when they begin."""
        self._job = job
        self.steps = steps
        self._accounts = steps, callback
        self._all = steps, callback, copied
        self._copied = copied
        self._training = Training(job)
        self._codes = users_codes(self._accounts)
        found = [stores_of(code) for code in self._codes]
        self._ways_of: dict[Hashable, set[str]] = {}
        given = functools.partial(_given_by_engine, job)
        self._holders = Holders(self._accounts, found, given)
        changes = [change for stores in found for change in stores.changes]
        #: Of what is called and cannot be looked into, as packages are passed by or it is no
        #: Python, a call may change it.
        self._packages = steps.packages
        kinds = {id(kind): kind for kind in map(type, self._holders.objects)}
        if self._packages is Packages.NONE or any(map(is_compiled, kinds.values())):
            changes += [call for stores in found for call in stores.calls]
        self._iterates = any(map(is_iterator, self._holders.with_names))
        queues = any(map(is_queue, kinds.values()))
        self._changes = [
            change
            for change in changes
            if not (is_of_tensors(change) or _is_of_its_maker(change))
            and (self._iterates or change.name != "__next__")
            and (queues or change.name not in TAKING)
        ]

    def may_change(self, other: Reach) -> Shared | None:
        """What it may change that the other's steps reach; None: nothing."""
        met = [
            (where, key, value)
            for key, (where, value) in self._changed.items()
            if key in (other.called_only if key in self.called_only else other.reached)
            and not (key in self.noted and key in other.noted)
        ]
        trained = self._training.changed
        where = f"the training of job {self._job.name!r}"
        met += [(where, key, trained[key]) for key in trained if key in other.seen]
        if not met:
            return None
        where, key, value = met[0]
        kept = next(
            (one for _, key, one in met if key == id(one) and not is_a(one, CONTAINERS)), None
        )
        return Shared(f"{other._name(key, value)}, which {where} may change", kept)

    @functools.cached_property
    def noted(self) -> frozenset[Hashable]:
        """The lists to which its code only adds, as one notes losses: where others do no more,
        either, that tells nothing to anybody."""
        found = self._changed.items()
        added = [(key, v) for key, (_, v) in found if type(v) is list]
        added = [(key, value) for key, value in added if self._ways_of[key] <= ADDING]
        return frozenset(key for key, value in added if not self._holders.reads(value))

    @functools.cached_property
    def called_only(self) -> frozenset[Hashable]:
        """Objects of packages that it calls, which may change by that: whoever does not call them,
        too, has them by way of what the package knows of everybody."""
        ways = self._ways_of
        return frozenset(key for key in self._changed if ways.get(key) == {_CALL})

    @property
    def changed(self) -> frozenset[Hashable]:
        """What it may change, by identities."""
        return frozenset(self._changed)

    @functools.cached_property
    def _changed(self) -> dict[Hashable, tuple[str, Any]]:
        """The same, with the lines that may do so, and the objects."""
        found: dict[Hashable, tuple[str, Any]] = {}
        for origin, ways in self._ways.items():
            for key, way, value in self._changed_at(origin, ways):
                found.setdefault(key, (ways[way], value))
                self._ways_of.setdefault(key, set()).add(_CALL if way.how == _CALL else way.name)
        for value, where in self._makers:
            found.setdefault(id(value), (where, value))
        used = [("whoever uses it", value) for value in self._moved]
        for where, value in used + [("whoever has it", value) for value in self._handed_on]:
            for key in keys_of(value):
                found.setdefault(key, (where, value))
                self._ways_of.setdefault(key, set()).add("*")
        for called in self._called_by_engine:
            found.setdefault(id(called), ("a call of it", called))
            self._ways_of.setdefault(id(called), set()).add(_CALL)
        for optimizer in self._optimizers:
            for parameter in trained_parameters(optimizer):
                for key in (id(parameter), *memory_of(parameter)):
                    found.setdefault(key, (f"a {type(optimizer).__name__}", parameter))
        return found

    @functools.cached_property
    def _handed_on(self) -> list[Any]:
        """What whoever has it changes: iterators that its code hands to other code, or to the
        engine, as its data's does; what has a changing method of C's that is held by itself."""
        bound = [one for one in self._holders.with_names if type(one) is BuiltinFunctionType]
        found = [one.__self__ for one in bound if is_changing(one.__name__)]
        partials = [one for one in self._holders.with_names if is_a(one, functools.partial)]
        found += [value for one in partials for value in bound_to_be_changed(one)]
        if is_iterator(self._job.data):
            found.append(self._job.data)
        if self._iterates:
            found += self._holders.iterators_handed_on
        nobodys = (ModuleType, type, type(None))
        return [one for one in found if not (is_a(one, nobodys) or id(one) in OF_THE_PROCESS)]

    @functools.cached_property
    def _moved(self) -> list[Any]:
        """What whoever uses it changes, as far as its own training does not anyway."""
        met = (value for account in self._accounts for value in account.own_objects)
        found = [moved for value in met for moved in moved_by_use(value)]
        found += self._generators_of_loaders
        return [one for one in found if id(one) not in self._training.own]

    @functools.cached_property
    def _generators_of_loaders(self) -> list[torch.Generator]:
        """Those that loaders behind its code draw from."""
        return [one for loader in self._loaders for one in generators_within(loader)]

    @functools.cached_property
    def _loaders(self) -> list[DataLoader[Any]]:
        job = self._job
        return [*_loaders_behind([job.data, *(getattr(job, name) for name in _GIVEN)])]

    @functools.cached_property
    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that its Python may step, beside its own."""
        kind = torch.optim.Optimizer
        return [one for account in self._accounts for one in account.instances(kind)]

    @property
    def _makers(self) -> Iterator[tuple[Any, str]]:
        """What makes an object when it is first asked for it, and has the same for whoever asks
        later: functions that remember what they have returned, properties that do, dictionaries
        with a default. Where code changes what may be such an object, the next job finds it
        changed; before the first one asks, nobody can see it."""
        for value in self._holders.with_names:
            kind: Any = type(value)
            if kind is Memo:
                if self._may_change_new(_made_by(getattr(value, "__wrapped__", None))):
                    yield value, "a call of it"
            elif is_a(value, defaultdict):
                factory: Any = vars(defaultdict)["default_factory"]
                if self._may_change_new(_made_by(factory.__get__(value))):
                    yield value, "a look into it"
            elif not (is_trusted_class(kind) or is_a(value, (type, ModuleType, FunctionType))):
                for name, part in _cached_properties(kind):
                    is_first = name in self._named and name not in getattr(value, "__dict__", ())
                    if is_first and self._may_change_new(_made_by(part.func)):
                        yield value, f"a look at its {name}"

    @functools.cached_property
    def _named(self) -> frozenset[str]:
        """The attributes that its code names."""
        return frozenset[str]().union(*(code_names(code).names for code in self._codes))

    def _may_change_new(self, kinds: frozenset[type]) -> bool:
        """Whether code may do more than add to objects of some classes that are handed to it, or
        lie in something. In-place operators do not count: tensors of unknown origin have them."""
        for origin, ways in self._ways.items() if kinds else ():
            if origin is None or origin.kind not in ("unknown", "parameter", "below"):
                continue
            owners = self._holders.owners_of(origin)
            for kind in kinds:
                for way in ways if owners is None or issubclass(kind, owners) else ():
                    adds = way.how == "operator" or (way.how == "method" and way.name in ADDING)
                    if not adds and may_be_changed(kind, way, origin, self._packages):
                        return True
        return False

    @functools.cached_property
    def _called_by_engine(self) -> list[Any]:
        """What is of packages that are passed by, and is called by whoever trains the job, or by
        its loaders."""
        job = self._job
        called = [getattr(job, name) for name in _GIVEN]
        for loader in self._loaders:
            called += loader.collate_fn, loader.sampler, loader.batch_sampler
        if is_own_class(type(job.data)):
            called += getattr(job.data, "called", ())
        way, origin = Way(_CALL, "", None), Origin("held")
        return [
            one
            for one in called
            if may_be_changed(type(one), way, origin, self._packages) and changes_when_called(one)
        ]

    @functools.cached_property
    def _ways(self) -> dict[Origin | None, dict[Way, str]]:
        """How what comes from where is changed, and by which line; None: variables."""
        found: dict[Origin | None, dict[Way, str]] = {}
        for change in self._changes:
            code = change.code
            where = f"{code.co_qualname} ({code.co_filename}:{change.line})"
            of_variable = change.how in ("variable", "cell")
            way = Way(change.how, change.name, code if of_variable else None)
            for origin in (None,) if of_variable else change.origins:
                found.setdefault(origin, {}).setdefault(way, where)
        together: dict[Origin | None, dict[Way, str]] = {}
        for origin, ways in found.items():
            known = (None,) if origin is None else self._holders.known_by([origin])
            for each in known:
                together[each] = ways | together.get(each, {})
        return together

    def _changed_at(
        self, origin: Origin | None, ways: Iterable[Way]
    ) -> Iterator[tuple[Hashable, Way, Any]]:
        if origin is not None:
            yield from self._changed_there(origin, ways)
            return
        for way in ways:
            yield from ((key, way, value) for key, value in self._variables(way))

    def _changed_there(
        self, origin: Origin, ways: Iterable[Way]
    ) -> Iterator[tuple[Hashable, Way, Any]]:
        by_kind: dict[int, list[Any]] = {}
        for value in self._holders.objects_of(origin):
            by_kind.setdefault(id(type(value)), []).append(value)
        known = origin.kind in ("held", "below", "class")
        known = known or self._holders.owners_of(origin) is not None
        for values in by_kind.values():
            kind = type(values[0])
            for way in ways:
                if is_a(values[0], ModuleType):
                    named = way.how == "attribute"
                    found = [v for m in values if named for v in _variables(vars(m), way.name)]
                    yield from ((key, way, value) for key, value in found)
                elif may_be_changed(kind, way, origin, self._packages):
                    for value in (v for v in values if _is_changed(v, way, known)):
                        if way.how != _CALL or changes_when_called(value):
                            yield id(value), way, value
                        yield from ((memory, way, value) for memory in memory_of(value))

    def _variables(self, way: Way) -> Iterator[tuple[Hashable, Any]]:
        assert way.code is not None
        for function in self._holders.functions.get(way.code, ()):
            if way.how == "variable":
                yield from _variables(function.__globals__, way.name)
            else:
                yield from ((id(c), c) for name, c in cells_of(function) if name == way.name)

    @functools.cached_property
    def reached(self) -> frozenset[Hashable]:
        """What its steps, evaluations and data reach, by identities."""
        found = _identities(self.steps) | _identities(self._copied) | self._batches.keys()
        found.update(map(id, self._generators_of_loaders))
        if any(not _ENVIRONMENT.isdisjoint(code_names(c).names) for c in self.steps.own_codes):
            found.add(id(os.environ))
        return frozenset(found)

    @functools.cached_property
    def seen(self) -> frozenset[Hashable]:
        """What any of its Python reaches, but for its own model: there others' training shows. What
        two models have in common is for whoever lets jobs in to refuse."""
        return (self.reached | _identities(self._accounts[1])) - self._training.own

    @property
    def trained(self) -> frozenset[Hashable]:
        """What its training changes by itself, by identities."""
        return frozenset(self._training.changed)

    def _name(self, key: Hashable, value: Any) -> str:
        """What it calls something that it reaches."""
        for place in self.steps.own_places:
            if isinstance(key, tuple):
                if isinstance(place, places.Names) and id(place.namespace) == key[0]:
                    return place.text(key[1])
            elif isinstance(place, places.Cell) and place.cell is value:
                return str(place.trail)
        if key in self._batches:
            return f"a {type(value).__name__} among the batches"
        named = value.__qualname__ if is_a(value, (type, FunctionType)) else type(value).__name__
        trails = (account.trail_of(value) for account in self._all)
        return next(filter(None, trails), named)

    @functools.cached_property
    def _batches(self) -> dict[int, Any]:
        """What can change in data that are a list of batches, but for tensors."""
        plain = type(self._job.data) in (list, tuple)
        found = within([self._job.data]) if plain else ()
        return {id(value): value for value in found if not is_a(value, torch.Tensor)}


class Shared(NamedTuple):
    """What one job may change that another's steps reach.

    Attributes:
        reason: what it is and which line may change it.
        value: an object of that which can be known again, if there is one.
    """

    reason: str
    value: Any


class Training:
    """What a job trains.

    Attributes:
        own: the tensors of its model, and the generators of its loader, which the engine sees to
            that no other job has: by their identities and memory.
        changed: what its training changes by itself, whatever its Python does, by the same.
    """

    def __init__(self, job: Job) -> None:
        """Looks at its model, optimizers and schedulers."""
        root, data = job.root, job.data
        own: list[Any] = [*root.parameters(), *root.buffers()]
        own += generators_within(data) if is_a(data, DataLoader) else ()
        self.own = frozenset(key for value in own for key in keys_of(value))
        optimizers = optimizers_in(job.optimizer)
        values: list[Any] = [*trained_parameters(job.optimizer)]
        values += (one for module in root.modules() for one in moved_by_use(module))
        values += (*optimizers, *(one.state for one in optimizers), *schedulers_in(job.scheduler))
        self.changed = {key: value for value in values for key in keys_of(value)}


def generators_within(loader: Any) -> list[torch.Generator]:
    """Those that a loader, or a sampler of it, draws from."""
    found = [*generators_of(loader), loader.generator]
    return [one for one in found if is_a(one, torch.Generator) and id(one) not in OF_THE_PROCESS]


def _identities(account: Account) -> set[Hashable]:
    """Of all that an account has met, by itself and by its memory."""
    found: set[Hashable] = {*account.identities}
    for place in account.own_places:
        if isinstance(place, places.Names):
            found.update((id(place.namespace), name) for name in place.trails)
    for array in account.instances(np.ndarray):
        found.update(memory_of(array))
    contents = within(account.large)
    found.update(id(value) for value in contents if type(value) not in CONSTANTS)
    return found


def _given_by_engine(job: Job, code: CodeType, place: int) -> list[Any] | None:
    """What a job's own functions are given by whoever trains it; None: nobody knows."""
    for name, given in _GIVEN.items():
        if code_of(getattr(job, name)) is not code or not 0 <= place < len(given):
            continue
        if given[place] != "batch":
            return [job.root] if given[place] == "model" else []
        if type(job.data) not in (list, tuple):
            return None
        batches = within([job.data], themselves=False)
        return [value for value in batches if not is_a(value, torch.Tensor)]
    return None


def _loaders_behind(values: Iterable[Any]) -> Iterator[DataLoader[Any]]:
    """The loaders that functions and data have of their own, not by way of some package, which may
    know of everybody's."""
    waiting, seen = deque(values), set[int]()
    while waiting and len(seen) < _MOST_BEHIND:
        value = waiting.popleft()
        if id(value) in seen or type(value) in CONSTANTS:
            continue
        seen.add(id(value))
        if is_a(value, DataLoader):
            yield value
        elif is_a(value, FunctionType):
            named = code_names(value.__code__).global_names
            waiting += [value.__globals__[name] for name in named if name in value.__globals__]
            waiting += value.__defaults__ or ()
            waiting += [held for _, held in attributes_of(value)]
        elif is_a(value, MethodType):
            waiting += value.__func__, value.__self__
        elif is_a(value, functools.partial):
            waiting += value.func, *value.args, *value.keywords.values()
        elif is_a(value, CONTAINERS):
            waiting += parts_of(value)
        elif not (is_a(value, (nn.Module, ModuleType, type)) or is_package_class(type(value))):
            waiting += [held for _, held in attributes_of(value)]


@of_each_class
def _cached_properties(kind: Any) -> list[tuple[str, Any]]:
    held = [(name, part) for each in kind.__mro__ for name, part in vars(each).items()]
    return [(name, part) for name, part in held if is_a(part, functools.cached_property)]


def _made_by(function: Any) -> frozenset[type]:
    """The classes that a function, or class, may return new objects of that can be changed, tensors
    and displays aside: what is remembered is a table of data, most often."""
    if function is None:
        return frozenset()
    if is_a(function, type):
        return frozenset() if _is_fixed(function) else frozenset({function})
    code = code_of(function)
    if code is None or is_trusted_code(code):
        return frozenset()
    codes = list(nested_codes(code))
    held = {**vars(builtins), **function.__globals__, **dict(attributes_of(function))}
    named = [held.get(name) for one in codes for name in code_names(one).names]
    kinds: list[Any] = [one for one in named if is_a(one, type)]
    return frozenset(kind for kind in kinds if not _is_fixed(kind))


def _is_fixed(kind: type) -> bool:
    return kind in CONSTANTS or kind is tuple or issubclass(kind, (torch.Tensor, BaseException))


def _is_changed(value: Any, way: Way, known: bool) -> bool:
    """Whether an object of a class that can be changed in this way is; `known`: it is told by more
    than what a function was handed, which has the attributes that it sets."""
    if way.how == "attribute" and not known and not has_attribute(value, way.name):
        return False
    return not is_looked_after(value)


def users_codes(accounts: Iterable[Account]) -> list[CodeType]:
    """The code that accounts have met, but for the library's."""
    codes = {code: None for account in accounts for code in account.own_codes}
    return [code for code in codes if not _is_known(code)]


def _is_known(code: CodeType) -> bool:
    """Whether code is the library's, or what the standard library writes for data classes."""
    of_data_class = code.co_qualname.startswith("__create_fn__.<locals>.")
    return is_trusted_code(code) or (of_data_class and code.co_filename == "<string>")


def _is_of_its_maker(change: Change) -> bool:
    """Whether a method that makes an object changes that, or what it was given for it."""
    code, kinds = change.code, {origin.kind for origin in change.origins}
    if code.co_name in OF_CLASSES and any(o.name in code.co_varnames[:1] for o in change.origins):
        return False
    return code.co_name in MAKERS and bool(kinds) and kinds <= {"parameter", "unknown"}


def _variables(namespace: dict[str, Any], name: str) -> Iterator[tuple[Hashable, Any]]:
    """A variable of a module, or all that are there now."""
    for each in list(namespace) if name == "*" else (name,):
        yield (id(namespace), each), namespace
