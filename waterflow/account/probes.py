"""How to ask objects of C code for their state without changing it: generators, iterators, arrays.

A probe's answer is made of plain values and of identities of objects, so that comparing two answers
runs nobody's code.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import gc
import itertools
import random
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


class Probe(NamedTuple):
    """How to read a state, whether it can be put back, what the object refers to, and what is to be
    kept so that it can be put back, if that is not the state as it was read."""

    read: Callable[[Any], Any]
    put_back: Callable[[Any, Any], Any] | None = None
    parts: Callable[[Any], Iterable[Any]] = lambda value: ()
    keep: Callable[[Any], Any] | None = None


def told_apart(value: Any) -> tuple[type, Any]:
    """What answers say of a value: equal for two that are one object, or plain and the same. True
    and 1 are two, and so are 0.0 and -0.0."""
    kind = type(value)
    if kind is tuple:
        return tuple, tuple(map(told_apart, value))
    if kind not in _PLAIN:
        return object, id(value)
    return kind, repr(value) if kind in (float, complex) else value


def is_plain(told: tuple[type, Any]) -> bool:
    """Whether what was told of a value is the same in any process."""
    kind, content = told
    return all(map(is_plain, content)) if kind is tuple else kind is not object


# Random generators


def _numpy_state(generator: np.random.Generator) -> Any:
    return _flat(generator.bit_generator.state)


def _flat(state: Any) -> Any:
    if isinstance(state, dict):
        return tuple((key, _flat(value)) for key, value in state.items())
    return state.tobytes() if isinstance(state, np.ndarray) else state


def _torch_state(generator: torch.Generator) -> bytes:
    return generator.get_state().numpy().tobytes()


def _set_torch_state(generator: torch.Generator, state: bytes) -> None:
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _legacy_state(generator: np.random.RandomState) -> Any:
    return _flat(generator.get_state(legacy=False))


def _nested(state: Any) -> Any:
    """The dictionary that numpy wants, from its flat form."""
    if isinstance(state, tuple) and all(isinstance(each, tuple) for each in state):
        return {key: _nested(value) for key, value in state}
    return np.frombuffer(state, dtype=_WORDS[len(state)]) if isinstance(state, bytes) else state


#: Arrays in the states of numpy's generators, by their bytes: MT19937, Philox (two), SFC64.
_WORDS = {624 * 4: np.uint32, 4 * 8: np.uint64, 2 * 8: np.uint64, 16 * 8: np.uint64}


def _set_numpy_state(generator: Any, state: Any) -> None:
    generator.bit_generator.state = _nested(state)


def _set_legacy_state(generator: np.random.RandomState, state: Any) -> None:
    generator.set_state(_nested(state))


# Iterators and generators


def _position(iterator: Any) -> Any:
    """Where a built-in iterator is: what it would be copied from."""
    reduced = iterator.__reduce__()
    if len(reduced) == 2 and len(reduced[1]) == 1 and type(reduced[1][0]) is list:
        # Made for the copy, of what is left (of a dictionary, say): its address says nothing.
        return _reduced(tuple(reduced[1][0]))
    return _reduced(reduced)


def _reduced(value: Any) -> Any:
    if type(value) is tuple:
        return tuple(map(_reduced, value))
    if type(value) is range:  # made for the copy as well, from Python 3.12 on of what is left
        return range, value.start, value.stop, value.step
    return (type(value), _position(value)) if type(value) in ITERATORS else told_apart(value)


def _iterated(iterator: Any) -> Iterable[Any]:
    return [part for part in _leaves(iterator.__reduce__()) if type(part) not in _PLAIN]


def _leaves(value: Any) -> Iterable[Any]:
    if type(value) is not tuple:
        yield value
        return
    for part in value:
        yield from _leaves(part)


def _frame(generator: types.GeneratorType[Any, Any, Any]) -> Any:
    frame = generator.gi_frame
    if frame is None:
        return None
    return frame.f_lasti, *((name, told_apart(value)) for name, value in frame.f_locals.items())


def _frame_values(generator: types.GeneratorType[Any, Any, Any]) -> Iterable[Any]:
    frame = generator.gi_frame
    return [] if frame is None else list(frame.f_locals.values())


# Others

_NOTHING = object()
#: What a context variable's probe tells where nobody has set it.
UNSET = told_apart(_NOTHING)


def _context_value(variable: contextvars.ContextVar[Any]) -> Any:
    return told_apart(variable.get(_NOTHING))


def _context_parts(variable: contextvars.ContextVar[Any]) -> Iterable[Any]:
    value = variable.get(_NOTHING)
    return () if value is _NOTHING else (value,)


def _referent(reference: weakref.ref[Any]) -> Any:
    return id(weakref.ref.__call__(reference))


def _referents(reference: weakref.ref[Any]) -> Iterable[Any]:
    return (weakref.ref.__call__(reference),)


def _objects(array: np.ndarray[Any, Any]) -> Any:
    values = tuple(told_apart(value) for value in array.ravel().tolist())
    return array.shape, array.flags.writeable, values


def _elements(array: np.ndarray[Any, Any]) -> Iterable[Any]:
    return array.ravel().tolist()


def _bytes(array: np.ndarray[Any, Any]) -> Any:
    kind = repr(array.dtype)
    return array.dtype.str, array.shape, array.tobytes(), kind, array.flags.writeable


def array_kept(array: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], bool]:
    """What an array is put back by: its values, and whether it can be written to."""
    return array.copy(), array.flags.writeable


def put_back_array(array: np.ndarray[Any, Any], kept: tuple[np.ndarray[Any, Any], bool]) -> None:
    """Gives an array back its values, their type, number and shape, and whether it can be written
    to."""
    values, writeable = kept
    with contextlib.suppress(ValueError, AttributeError, TypeError):  # not this array's to say
        array.flags.writeable = True
        if array.dtype != values.dtype:
            array.dtype = values.dtype  # type: ignore[misc]
        if array.size != values.size:
            array.resize(values.shape, refcheck=False)
        if array.shape != values.shape:
            array.shape = values.shape
        np.copyto(array, values)
        array.flags.writeable = writeable


_ARGUMENTS: Any = vars(BaseException)["args"]
_CAUSE: Any = vars(BaseException)["__cause__"]


def _raised(error: BaseException) -> Any:
    return told_apart(_raised_with(error))


def _raised_with(error: BaseException) -> tuple[Any, Any]:
    return _ARGUMENTS.__get__(error), _CAUSE.__get__(error)


def _raise_with(error: BaseException, kept: tuple[Any, Any]) -> None:
    _ARGUMENTS.__set__(error, kept[0])
    if _CAUSE.__get__(error) is not kept[1]:  # sets another attribute, too
        _CAUSE.__set__(error, kept[1])


Memo = type(functools.lru_cache(len))


def _type_of_links() -> type:
    """Of what a cache with a limit keeps its entries in."""
    memo = functools.lru_cache(maxsize=1)(len)
    memo("")
    (link,) = _table(memo).values()
    return type(link)


def _table(memo: Any) -> dict[Any, Any]:
    tables = (part for part in gc.get_referents(memo) if type(part) is dict)
    return next(table for table in tables if table is not vars(memo))


_LINK = _type_of_links()


def _entries(memo: Any) -> list[tuple[Any, Any]]:
    """What a cache of results holds: arguments and results. One with a limit has them in links,
    which the garbage collector alone can see into: both come before their link's type."""
    table = _table(memo)
    entries = [(key, value) for key, value in table.items() if type(value) is not _LINK]
    linked = len(table) - len(entries)
    parts = gc.get_referents(memo) if linked else []
    ends = [index for index, part in enumerate(parts) if part is _LINK][:linked]
    return entries + [(parts[end - 2], parts[end - 1]) for end in ends]


def _remembered(memo: Any) -> frozenset[Any]:
    """In no order: a hit moves an entry to the end."""
    return frozenset((told_apart(key), told_apart(value)) for key, value in _entries(memo))


def _remembered_objects(memo: Any) -> Iterable[Any]:
    values = itertools.chain.from_iterable(_entries(memo))
    return [value for value in values if type(value) not in _PLAIN]


_FACTORY: Any = vars(collections.defaultdict)["default_factory"]


def _factory(values: Any) -> tuple[type, Any]:
    return told_apart(_FACTORY.__get__(values))


def _put_back_factory(values: Any, factory: Any) -> None:
    _FACTORY.__set__(values, factory)


DEFAULT_FACTORY = Probe(
    _factory, _put_back_factory, lambda values: (_FACTORY.__get__(values),), _FACTORY.__get__
)
MEMO = Probe(_remembered, None, _remembered_objects)
OBJECT_ARRAY = Probe(_objects, put_back_array, _elements, array_kept)
STRIDED_ARRAY = Probe(_bytes, put_back_array, keep=array_kept)
EXCEPTION = Probe(_raised, _raise_with, _raised_with, _raised_with)

ITERATORS: dict[type, Probe] = {}


def _iterators() -> Iterable[type]:
    yield from map(type, (iter([]), iter(()), iter({}), iter(set()), iter(""), iter(b"")))
    yield from map(type, (iter({}.values()), iter({}.items()), iter(range(0)), reversed([])))
    yield from (enumerate, zip, map, filter, type(iter(collections.deque())))
    yield from (reversed, type(iter(range(1 << 70))), type(iter(lambda: 0, 0)))
    yield from (itertools.chain, itertools.count, itertools.cycle, itertools.islice)
    yield from (itertools.repeat, itertools.starmap, itertools.product, itertools.compress)


for _kind in _iterators():
    if "__reduce__" in vars(_kind):
        ITERATORS[_kind] = Probe(_position, None, _iterated)
ITERATORS[itertools.count] = Probe(repr)  # its numbers; it cannot be copied in all versions

#: What keeps its state where only its own functions reach, by exact type.
PROBES: dict[type, Probe] = {
    random.Random: Probe(random.Random.getstate, random.Random.setstate),
    np.random.Generator: Probe(_numpy_state, _set_numpy_state),
    np.random.RandomState: Probe(_legacy_state, _set_legacy_state),
    torch.Generator: Probe(_torch_state, _set_torch_state),
    types.GeneratorType: Probe(_frame, None, _frame_values),
    contextvars.ContextVar: Probe(_context_value, None, _context_parts),
    weakref.ref: Probe(_referent, None, _referents),
    **ITERATORS,
}

#: Objects of these can be reached by several jobs, or twice, and move.
MOVING: tuple[type, ...] = (*(kind for kind in PROBES if kind is not weakref.ref),)


def moves(holder: Any) -> bool:
    """Whether using it moves it: iterators, generators, caches of results."""
    return type(holder) in ITERATORS or type(holder) in (types.GeneratorType, Memo)
