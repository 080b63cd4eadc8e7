"""An account of the Python state that a step reads: is it still what it was, and what has changed.

A step's Python code computes a function of what it can read: attributes, closures, globals, items
of containers, random generators. `Account.take` walks all of that from the step's model, loss
function, optimizer and hooks (`walk`) and remembers it as a flat list of checks in C++.
With the names that an observed step has executed, only what these can read counts. What cannot be
walked is listed, never assumed constant. Contents of tensors are not state here.
"""

from __future__ import annotations

import functools
import math
from collections import ChainMap
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any, NamedTuple, TypeVar

from waterflow.account.class_parts import is_a
from waterflow.account.code_names import names_in
from waterflow.account.code_walk import NOTHING_LATE, Late
from waterflow.account.places import Place, Probed, Trail
from waterflow.account.probes import moves
from waterflow.account.trust import Packages
from waterflow.account.walk import Limits, Walk

__all__ = ["Account"]

Wanted = TypeVar("Wanted")
#: Names that walks came to, by the kinds of their roots; so many kinds are remembered.
_KNOWN_NAMES: dict[Hashable, frozenset[str]] = {}
_MOST_KINDS = 256
_ALL = Limits()
#: What a training loop, or torch's C code, calls by itself.
_CALLED = frozenset({"forward", "backward", "step", "zero_grad", "parameters"})


class _How(NamedTuple):
    """How an account is taken; see `Account.take`."""

    executed_only: bool
    packages: Packages
    limits: Limits
    computed: bool


class Account:
    """State that a step can read, as it was when the account was taken."""

    def __init__(self, walk: Walk) -> None:
        """Takes over what a walk has found; use `take`."""
        #: Every place that is checked but for the library's, in the order of the walk.
        self.own_places: list[Place] = walk.places
        #: What the library's code leads to, if that is shared with other accounts.
        self.library = walk.library
        self._checked: list[tuple[Any, Sequence[Place]]] = [(walk.guards, walk.places)]
        if walk.library is not None:
            self._checked.append((walk.library.guards, walk.library.places))
        #: The attributes that count; None: any.
        self.names: frozenset[str] | None = walk.names
        self._executes = walk.executes
        #: The packages whose code was looked into.
        self.packages = walk.packages
        self._objects: Mapping[int, Trail] = walk.objects
        if walk.library is not None and walk.library.objects:
            self._objects = ChainMap(walk.objects, walk.library.objects)
        self._walked = walk.seen
        self._classes = walk.classes
        #: Containers that the walk met and did not look into, as they have too many items.
        self.large = walk.large
        #: Whether all was walked that there is, but for what is unwalkable.
        self.is_whole = walk.is_whole
        #: Code objects of the functions that the walk met but for the library's, with those inside
        #: them.
        self.own_codes: frozenset[CodeType] = frozenset(walk.codes.values())
        #: Where there are objects whose state cannot be read, and their type or the reason.
        self.unwalkable: list[tuple[str, str]] = [(str(t), what) for t, what in walk.unwalkable]
        #: Built-in functions that the code met names.
        self.built_ins = list(walk.built_ins.values())
        #: Modules of torch, numpy and the standard library that the code met names.
        self.libraries = frozenset(walk.libraries)

    @functools.cached_property
    def codes(self) -> frozenset[CodeType]:
        """Code objects of the functions that the walk met, with those inside them."""
        return self.own_codes if self.library is None else self.own_codes | self.library.codes

    @property
    def guards(self) -> list[Any]:
        """The extension's forms of the checks."""
        return [guards for guards, _ in self._checked]

    @property
    def places(self) -> list[Place]:
        """Every place that is checked."""
        return [place for _, held in self._checked for place in held]

    @property
    def irrevocable(self) -> list[str]:
        """What may move when used, and could not be put back: iterators, generators, caches."""
        return [
            str(place.trail)
            for place in self.own_places
            if isinstance(place, Probed) and place.put_back is None and moves(place.holder)
        ]

    @classmethod
    def take(
        cls,
        roots: Mapping[str, Any],
        names: Collection[str] | None = None,
        codes: Collection[CodeType] | None = None,
        skip: Mapping[int, Collection[Any] | None] | None = None,
        everything: bool = False,
        executed_only: bool = False,
        packages: Packages = Packages.ALL,
        limits: Limits = _ALL,
        unless_any: bool = False,
        late: Late = NOTHING_LATE,
        computed: bool = True,
    ) -> Account:
        """Remembers all that can be read from some objects.

        Args:
            roots: the objects to begin from, by the names that users know them by.
            names: the attributes that count, as `code_names.names_in` gives them; None: any.
            codes: the code that is executed, so that other functions need not be looked into;
                None: nothing is known of it, so all functions are looked into that the objects
                have by the names in each other's code, and these names count.
            skip: attributes, keys or indices whose values do not count, by the id of the object,
                dictionary or list that has them; None for all that it has.
            everything: whether without names every attribute of every object counts, named or not.
            executed_only: whether attributes do not count that are only copied along with their
                object.
            packages: which ones' code is looked into.
            limits: how far it goes; an account of a walk that ended before has something
                unwalkable.
            unless_any: nothing is walked where the code may read any attribute, which in a process
                with large libraries leads far; the account then has something unwalkable.
            late: what is walked last, and skipped only where nothing else leads to it.
            computed: whether names count that code computes, and so may be any.
        """
        how = _How(executed_only, packages, limits, computed)
        if codes is None and names is None and not everything:
            found = _walk_by_reachable_names(roots, skip or {}, how, late)
            if found is not None:
                return cls(found)
            if unless_any:
                walk = Walk(frozenset(), None, {})
                walk.unwalkable.append((Trail("the code"), "reads attributes by names not known"))
                return cls(walk)
        walk = _walk_along(names, roots, skip or {}, how, late, codes)
        if walk.holds_reader and names is not None:
            walk = _walk_along(None, roots, skip or {}, how, late, codes)
        return cls(walk)

    def executes(self, code: CodeType) -> bool:
        """Whether a function of this code was looked into."""
        return self._executes(code)

    def holds(self) -> bool:
        """Whether everything is as it was."""
        return all(guards.holds() for guards in self.guards)

    def difference(self) -> str | None:
        """What is not as it was, as a user would call it; None if all is."""
        for guards, held in self._checked:
            found = guards.difference()
            if found is not None:
                return held[found[0]].text(found[1])
        return None

    def differences(self) -> list[str]:
        """Everything that is not as it was."""
        return [place.text(part) for place, part in self._differing()]

    def restore(self) -> list[str]:
        """Puts back what was there, place by place.

        Returns:
            What could not be put back: positions of iterators, replaced storages of tensors.
        """
        for place, _ in self._differing():
            try:
                place.restore()
            except Exception:
                continue  # it shows in what still differs
        return self.differences()

    def _differing(self) -> list[tuple[Place, Any]]:
        """The places that are not as they were, and the parts of them that differ."""
        return [
            (held[index], part)
            for guards, held in self._checked
            for index, part in guards.differences()
        ]

    @property
    def objects(self) -> frozenset[int]:
        """Ids of all objects that can change, and addresses of the tensors' storages."""
        return frozenset(self._objects)

    def trail_of(self, value: object) -> str | None:
        """How an object that can change was reached; None where it was not, or cannot."""
        trail = self._objects.get(id(value))
        return None if trail is None else str(trail)

    def instances(self, kind: type[Wanted]) -> list[Wanted]:
        """The objects of a type that the walk met."""
        met = self._walked.values(), () if self.library is None else self.library.met
        return [value for values in met for value in values if is_a(value, kind)]

    @property
    def own_objects(self) -> Collection[Any]:
        """The objects that the walk met, but for classes and the library's."""
        return self._walked.values()

    @property
    def own_classes(self) -> Collection[type]:
        """The classes of objects that the walk met, and what they are derived from, but for those
        that only the library's code leads to."""
        return self._classes.values()

    @property
    def identities(self) -> frozenset[int]:
        """Of all that the walk met but for the library's: objects, classes, variables of functions,
        the memory of tensors (by the addresses of their storages)."""
        return frozenset((*self._walked, *self._classes, *self._objects))

    def shared(self, other: Account) -> list[str]:
        """What this and another account both reach and could change, as this one calls it."""
        common = self._objects.keys() & other._objects.keys()
        return [str(self._objects[key]) for key in common]

    def reaches(self, other: Account) -> bool:
        """Whether some object that can change is in both accounts."""
        return other.has_any(self._objects.keys())

    def has_any(self, identities: Iterable[int]) -> bool:
        """Whether one of these objects that can change is in it; a tensor's memory is one, too, by
        the address of its storage."""
        return not self._objects.keys().isdisjoint(identities)


def _walk_by_reachable_names(
    roots: Mapping[str, Any],
    skip: Mapping[int, Collection[Any] | None],
    how: _How,
    late: Late,
) -> Walk | None:
    """A walk along the names in all code that the roots have by these very names; None if that
    code reads any attribute.

    The names are found by walks along more and more of them. Jobs of one kind end at the same, so
    those that the latest came to are tried first: where the code that they lead to has them and no
    others, they are what counts here, too.
    """
    timeless = how._replace(limits=how.limits._replace(until=math.inf))
    kind = tuple(map(_kind_of, roots.values())), timeless
    names = _KNOWN_NAMES.get(kind)
    if names is not None:
        walk = _walk_along(names, roots, skip, how, late)
        hides = walk.unwalkable and not how.executed_only  # which fewer names might not have met
        if walk.is_whole and not hides and _named(walk, how) == names:
            return walk
    names = _CALLED
    while True:
        walk = _walk_along(names, roots, skip, how, late)
        if not walk.is_whole:
            return walk
        more = _named(walk, how)
        if more is None:
            return None
        if more <= names:
            _note_names(kind, names)
            return walk
        names |= more


def _walk_along(
    names: Collection[str] | None,
    roots: Mapping[str, Any],
    skip: Mapping[int, Any],
    how: _How,
    late: Late,
    codes: Collection[CodeType] | None = None,
) -> Walk:
    walk = Walk(names, codes, skip)
    walk.limits, walk.packages = how.limits, how.packages
    walk.run(roots, late)
    return walk


def _named(walk: Walk, how: _How) -> frozenset[str] | None:
    if how.computed and walk.holds_reader:
        return None
    copied = not how.executed_only
    more = names_in(walk.codes.values(), copied=copied, computed=how.computed)
    if walk.library is not None and more is not None:
        known = walk.library.copied_names if copied else walk.library.names
        if known is None and how.computed:
            return None
        more |= known or frozenset()
    return None if more is None else more | _CALLED | walk.handed_names


def _kind_of(root: Any) -> int:
    """Equal for roots of one kind; perhaps for others, too, once that kind is gone."""
    return id(root.__code__ if type(root) is FunctionType else type(root))


def _note_names(kind: Hashable, names: frozenset[str]) -> None:
    while len(_KNOWN_NAMES) >= _MOST_KINDS:
        _KNOWN_NAMES.pop(next(iter(_KNOWN_NAMES)), None)
    _KNOWN_NAMES[kind] = names
