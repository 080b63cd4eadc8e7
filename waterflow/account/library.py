"""What the code of torch, numpy and the standard library leads to: walked once for all jobs.

Most of what a step can read is the library's: hundreds of functions, the modules whose names they
use, classes with their methods. Which of it a job comes to is told by where its own objects and
code enter the library, and by the names and the code that count. For equal entries a walk finds the
same, as long as nobody has changed anything on the way: so it is kept, with checks of all that it
has gone by, and looked at anew before it is used again. Where somebody's own objects hang in the
library, as hooks for all modules do, nothing is shared.
"""

from __future__ import annotations

import functools
import operator
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from waterflow.account import places
from waterflow.account.class_parts import is_a, is_of_pybind
from waterflow.account.code_names import names_in
from waterflow.account.trust import is_trusted_class, is_trusted_code
from waterflow.allocator_ext import _C

#: So many parts are remembered, of the kinds of jobs that were there last.
_MOST_PARTS = 256
#: What the library consists of, where nobody has hung anything of his own into it.
_PLACES = frozenset(
    {
        *(places.Names, places.ClassAttributes, places.Attributes, places.Mapping, places.Items),
        *(places.LibraryFunctions, places.Registered),
    }
)


class LibraryPart:
    """What some entries of the library lead to.

    Attributes:
        guards: the extension's form of the checks.
        places: what is checked.
        codes: code objects of the functions, with those inside them.
        met: all objects that the walk met.
        identities: theirs.
        objects: those that can change, by identity, and how they were reached.
    """

    def __init__(
        self,
        guards: _C.Guards,
        held: Collection[places.Place],
        codes: Collection[CodeType],
        executes: Callable[[CodeType], bool],
        met: Mapping[int, Any],
        objects: dict[int, places.Trail],
        namespaces: Mapping[int, tuple[dict[str, Any], set[str]]],
    ) -> None:
        """Takes over what a walk along the library has found.

        Args:
            guards: the checks.
            held: what is checked.
            codes: of the functions met.
            executes: whether a function of some code is looked into.
            met: all objects met, by identity.
            objects: those of them that can change, and how they were reached.
            namespaces: the variables of modules that were looked for, found or not.
        """
        self.guards = guards
        self.places = tuple(held)
        self.codes = frozenset(codes)
        self.executes = executes
        self.identities = frozenset((*met, *namespaces))
        self.objects = objects
        self.met = tuple(met.values())
        self._way = _C.Guards()  # what a walk goes by without its being state
        for namespace, names in namespaces.values():
            self._way.keys(namespace, sorted(names))
        for value in self.met:
            if type(value) is FunctionType:
                self._way.function(value)
                for cell in value.__closure__ or ():
                    self._way.cell(cell)

    @functools.cached_property
    def names(self) -> frozenset[str] | None:
        """Of the attributes that this code can read; None: it can read any."""
        return names_in(self.codes, copied=False)

    @functools.cached_property
    def copied_names(self) -> frozenset[str] | None:
        """The same with those that are only copied along with their objects."""
        return names_in(self.codes)

    def is_as_found(self) -> bool:
        """Whether a walk would find the same now."""
        return bool(self.guards.holds() and self._way.holds())


#: Functions of the library's, as a walk has found them for the first time.
_first_met = WeakKeyDictionary[FunctionType, tuple[tuple[Any, ...], list[Any]]]()


def is_as_first_met(function: FunctionType) -> bool:
    """Whether a function of the library's has the code and defaults that it had when a walk came to
    it for the first time: if not, somebody has changed it in place, and it is none of the
    library's."""
    parts = function.__code__, function.__defaults__, function.__kwdefaults__
    words = list((function.__kwdefaults__ or {}).items())
    known, known_words = _first_met.setdefault(function, (parts, words))
    return all(map(operator.is_, parts, known)) and words == known_words


_parts: OrderedDict[Hashable, tuple[LibraryPart, Any]] = OrderedDict()


def part_for(
    key: Hashable, kept: Any, walked: Callable[[], LibraryPart | None]
) -> LibraryPart | None:
    """What some entries lead to; None where that is not to be shared.

    Args:
        key: of the entries, and of how they are walked; it may have identities.
        kept: objects whose identities are in the key.
        walked: walks them; None where somebody's own objects are among what they lead to. It is
            asked anew each time: an account with a part has another structure than one without.
    """
    known = _parts.pop(key, None)
    part = known[0] if known is not None and known[0].is_as_found() else walked()
    if part is not None:
        _parts[key] = part, kept
        while len(_parts) > _MOST_PARTS:
            _parts.popitem(last=False)
    return part


def are_librarys(
    held: Iterable[places.Place], codes: Iterable[CodeType], met: Iterable[Any]
) -> bool:
    """Whether places, code and objects are the library's own, and there for all."""
    return (
        all(type(place) in _PLACES for place in held)
        and all(map(is_trusted_code, codes))
        and all(map(_is_librarys, met))
    )


def _is_librarys(value: Any) -> bool:
    if type(value) is FunctionType:
        return is_trusted_code(value.__code__)
    kind = value if is_a(value, type) else type(value)
    return is_trusted_class(kind) or is_of_pybind(kind)
