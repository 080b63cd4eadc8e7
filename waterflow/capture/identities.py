"""Where a step would tell a trace's copies of modules and parameters from what they stand for.

A trace runs on copies of the model's modules and tensors (`shadow`). What its code finds elsewhere
are those of the user's: as keys of a dictionary, in a set, in an object that is no module, in a
closure. An operator takes either for the same; ``is``, ``in`` and a look into a dictionary do not,
and the first check may not show it (a penalty that begins late).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Iterator, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch

from waterflow.account import places
from waterflow.account.account import Account
from waterflow.account.bytecode import compares_identities, reads_first_argument
from waterflow.account.code_names import code_names
from waterflow.account.places import REGISTRIES
from waterflow.account.trust import is_of_trusted_classes, is_trusted_code
from waterflow.job.job import Job
from waterflow.job.optimizer_state import trained_parameters
from waterflow.job.several import optimizers_in

#: Attributes of optimizers that a trace replaces.
_REPLACED = frozenset({"param_groups", "state", "defaults"})


def told_apart(job: Job, account: Account, codes: Collection[CodeType]) -> str | None:
    """What a step that executes this code could find in a trace that it would not find in the loop,
    or the other way round; None where there is nothing."""
    if job.step is not None:
        return None  # it has the user's own modules in a trace, too
    parts = _Parts(job)
    if not parts.are_copied:
        return None
    users = sorted(
        (code for code in codes if not is_trusted_code(code)),
        key=lambda code: (code.co_filename, code.co_firstlineno),
    )
    asking = [code for code in users if "id" in code_names(code).global_names]
    if asking:
        return f"the step asks which object is which, and a trace has copies ({_where(asking)})"
    comparing = [code for code in users if compares_identities(code)]
    for holder, trail, is_hashed in parts.held_apart(account, bool(comparing)):
        if is_hashed or comparing:
            what = "looked up by" if is_hashed else "compared with"
            return (
                f"{trail} ({type(holder).__name__}) can be {what} a module or tensor of the model, "
                f"of which a trace has copies ({_where(comparing or users)})"
            )
    return None


def _where(codes: Sequence[CodeType]) -> str:
    return ", ".join(f"{each.co_filename}:{each.co_firstlineno}" for each in codes[:1])


class _Parts:
    """What a trace has copies of: modules of the model, their tensors, the optimizer's groups."""

    def __init__(self, job: Job) -> None:
        modules = list(job.root.modules())
        self._optimizers = optimizers_in(job.optimizer)
        own = all(map(is_of_trusted_classes, self._optimizers))
        #: Whether code of the user's meets both a copy and what it stands for.
        self.are_copied = not own or _takes_model(job.function)
        tensors = [*job.root.parameters(), *job.root.buffers(), *trained_parameters(job.optimizer)]
        groups = [group for one in self._optimizers for group in one.param_groups]
        states = [one.state for one in self._optimizers]
        self._ids = set(map(id, (*modules, *tensors, *groups, *states)))
        self._copied = {id(one) for one in (*modules, *groups, *states)}
        self._registries = {id(vars(module)[name]) for module in modules for name in REGISTRIES}
        self._met_twice: list[Any] = []
        for module in modules:
            for value in vars(module).values():
                self._note_copied(value)
        for one in self._optimizers:
            self._note_copied(one.param_groups)
        for value in (value for group in groups for value in group.values()):
            self._note_copied(value)

    def _note_copied(self, value: Any) -> None:
        """Containers that a trace makes anew around copies, each time that it meets them."""
        if type(value) is functools.partial:
            for part in (value.args, value.keywords):
                self._note_copied(part)
        if id(value) in self._ids or not isinstance(value, (list, tuple, dict)):
            return
        items = value.values() if isinstance(value, dict) else value
        if id(value) not in self._copied:
            self._copied.add(id(value))
            for item in items:
                self._note_copied(item)
        elif id(value) in self._registries or any(map(self._holds, items)):
            self._met_twice.append(value)

    def held_apart(
        self, account: Account, comparing: bool
    ) -> Iterator[tuple[Any, places.Trail | str, bool]]:
        """Whoever holds one of them where a trace does not replace it, how it was reached, and
        whether it goes by its hash; without `comparing` no others."""
        for place in account.places:
            if not (comparing or isinstance(place, (places.Mapping, places.Items))):
                continue  # nobody compares what is there
            holder, held, keys = _contents(place)
            if any(map(self._is_one, keys)) and id(holder) not in self._states:
                yield holder, place.trail, True
            elif self._has_as_they_are(place, holder, held):
                yield holder, place.trail, False
        for value in self._met_twice:
            yield value, "what the model has in two places", False
        for value in account.own_objects:
            if type(value) is frozenset and any(map(self._is_one, value)):
                yield value, account.trail_of(value) or "a frozenset", True

    @functools.cached_property
    def _states(self) -> set[int]:
        return {id(one.state) for one in self._optimizers}

    def _has_as_they_are(self, place: places.Place, holder: Any, held: Collection[Any]) -> bool:
        """Whether a trace finds some of them in this place."""
        if id(holder) in self._copied:
            return False
        if isinstance(holder, torch.optim.Optimizer) and isinstance(place, places.Attributes):
            held = [value for name, value in place.before.items() if name not in _REPLACED]
        return any(map(self._holds, held))

    def _is_one(self, value: Any) -> bool:
        if isinstance(value, weakref.ref):
            value = value()
        return id(value) in self._ids

    def _holds(self, value: Any) -> bool:
        if self._is_one(value):
            return True
        return type(value) in (tuple, frozenset) and any(map(self._holds, value))


def _contents(place: places.Place) -> tuple[Any, Collection[Any], Collection[Any]]:
    """The object at a place, what it holds, and by what it is asked for that."""
    match place:
        case places.Mapping():
            keys = [key for key, _ in place.before]
            return place.holder, [value for _, value in place.before], keys
        case places.Items():
            is_set = place.base is set
            return place.holder, () if is_set else place.before, place.before if is_set else ()
        case places.Attributes():
            return place.holder, place.before.values(), ()
        case places.ClassAttributes():
            return place.kind, place.before.values(), ()
        case places.Names():
            return place.namespace, place.before.values(), ()
        case places.Cell():
            return place.cell, place.before, ()
        case places.Slot():
            return place.holder, place.before, ()
    return None, (), ()


def _takes_model(function: Any) -> bool:
    """Whether a loss does anything with the model that it is given."""
    if isinstance(function, MethodType):
        return not isinstance(function.__func__, FunctionType) or reads_first_argument(
            function.__func__.__code__, behind=1
        )
    return not isinstance(function, FunctionType) or reads_first_argument(function.__code__)
