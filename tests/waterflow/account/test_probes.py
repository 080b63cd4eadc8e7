"""Probes read a state without moving it, and put it back where they say so."""

import collections
import contextvars
import itertools
import random
import weakref

import numpy as np
import pytest
import torch

from waterflow.account.probes import (
    EXCEPTION,
    ITERATORS,
    OBJECT_ARRAY,
    PROBES,
    STRIDED_ARRAY,
    moves,
)

pytestmark = pytest.mark.virtual

#: How each random generator is made, and drawn from.
GENERATORS = {
    "random": (lambda: random.Random(1), lambda made: made.random()),
    "numpy": (lambda: np.random.default_rng(1), lambda made: made.random()),
    "philox": (
        lambda: np.random.Generator(np.random.Philox(1)),
        lambda made: made.integers(9, dtype=np.int32),
    ),
    "sfc": (lambda: np.random.Generator(np.random.SFC64(1)), lambda made: made.random()),
    "mersenne": (lambda: np.random.Generator(np.random.MT19937(1)), lambda made: made.random()),
    "legacy": (lambda: np.random.RandomState(1), lambda made: made.randn()),
    "torch": (lambda: torch.Generator().manual_seed(1), lambda made: torch.rand(1, generator=made)),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_is_put_back(name):
    make, draw = GENERATORS[name]
    generator = make()
    probe = PROBES[type(generator)]
    before = probe.read(generator)
    assert probe.read(generator) == before  # reading draws nothing
    first = [float(draw(generator)) for _ in range(3)]
    assert probe.read(generator) != before
    probe.put_back(generator, before)
    assert probe.read(generator) == before
    assert [float(draw(generator)) for _ in range(3)] == first


ITERATED = {
    "list": lambda: iter([1, 2, 3]),
    "tuple": lambda: iter((1, 2, 3)),
    "keys": lambda: iter({1: 2, 3: 4}),
    "values": lambda: iter({1: "a", 3: "b"}.values()),
    "items": lambda: iter({1: 2, 3: 4}.items()),
    "set": lambda: iter({1, 2}),
    "enumerate": lambda: enumerate([1, 2]),
    "zip": lambda: zip([1, 2], [3, 4], strict=False),
    "map": lambda: map(abs, [1, 2]),
    "chain": lambda: itertools.chain([1], [2]),
    "count": lambda: itertools.count(),
    "cycle": lambda: itertools.cycle([1, 2]),
    "islice": lambda: itertools.islice([1, 2, 3], 2),
    "deque": lambda: iter(collections.deque([1, 2])),
    "range": lambda: iter(range(3)),
    "long range": lambda: iter(range(1 << 70)),
    "zipped ranges": lambda: zip(range(3), range(4), strict=False),
    "reversed range": lambda: reversed(range(3)),
    "reversed list": lambda: reversed([1, 2]),
    "text": lambda: iter("ab"),
    "bytes": lambda: iter(b"ab"),
    "filter": lambda: filter(None, [1, 2]),
    "product": lambda: itertools.product([1, 2], [3, 4]),
    "repeat": lambda: itertools.repeat(1, 3),
    "compress": lambda: itertools.compress([1, 2, 3], [1, 1, 1]),
    "starmap": lambda: itertools.starmap(abs, [(1,), (2,)]),
}


@pytest.mark.parametrize("name", ITERATED)
def test_an_iterator_is_seen_to_move_and_reading_does_not_move_it(name):
    iterator, twin = ITERATED[name](), ITERATED[name]()
    probe = ITERATORS[type(iterator)]
    assert moves(iterator)
    assert probe.put_back is None
    before = probe.read(iterator)
    # What was made for the reading is gone, and its place taken.
    taken = [[range(number), [number], (number, number)] for number in range(1000)]
    assert probe.read(iterator) == before
    for _ in range(2):
        del taken[:]
        assert next(iterator) == next(twin)
        after = probe.read(iterator)
        assert after != before
        before = after


def test_what_an_iterator_goes_through_is_part_of_it():
    held = [object()]
    iterator = map(abs, held)
    parts = list(ITERATORS[map].parts(iterator))
    assert any(part is abs for part in parts)


def counter():
    yield "a"
    yield "b"
    yield "c"


def test_a_generator_function_is_known_by_its_frame():
    made = counter()
    probe = PROBES[type(made)]
    states = [probe.read(made)]
    for _ in made:
        states.append(probe.read(made))
    states.append(probe.read(made))
    assert len(set(states)) == 5
    assert states[-1] is None
    assert moves(made)


def test_a_context_variable_is_known_by_its_value():
    variable = contextvars.ContextVar("variable")
    probe = PROBES[contextvars.ContextVar]
    assert list(probe.parts(variable)) == []
    before, held = probe.read(variable), [1]
    variable.set(held)
    assert probe.read(variable) != before
    assert list(probe.parts(variable)) == [held]


def test_a_weak_reference_is_known_by_what_it_refers_to():
    class Thing:
        pass

    thing = Thing()
    reference, probe = weakref.ref(thing), PROBES[weakref.ref]
    before = probe.read(reference)
    del thing
    assert probe.read(reference) != before


def test_arrays():
    strided = np.arange(6.0).reshape(2, 3)[:, ::2]
    before, kept = STRIDED_ARRAY.read(strided), STRIDED_ARRAY.keep(strided)
    strided[0, 1] = 7.0
    strided.flags.writeable = False
    assert STRIDED_ARRAY.read(strided) != before
    STRIDED_ARRAY.put_back(strided, kept)
    assert STRIDED_ARRAY.read(strided) == before
    assert strided.tolist() == [[0.0, 2.0], [3.0, 5.0]]
    held = [1]
    objects = np.array([held, None], dtype=object)
    before, kept = OBJECT_ARRAY.read(objects), OBJECT_ARRAY.keep(objects)
    assert any(part is held for part in OBJECT_ARRAY.parts(objects))
    objects[0] = [1]
    assert OBJECT_ARRAY.read(objects) != before
    OBJECT_ARRAY.put_back(objects, kept)
    assert objects[0] is held


def test_arrays_of_fields_come_back():
    rows = np.zeros(2, dtype=[("weight", "f4"), ("kind", "i4")])
    before, kept = STRIDED_ARRAY.read(rows), STRIDED_ARRAY.keep(rows)
    rows["weight"] += 1.5
    assert STRIDED_ARRAY.read(rows) != before
    STRIDED_ARRAY.put_back(rows, kept)
    assert STRIDED_ARRAY.read(rows) == before


def test_exceptions():
    error, cause = ValueError([1]), KeyError()
    before, kept = EXCEPTION.read(error), EXCEPTION.keep(error)
    assert [1] in next(iter(EXCEPTION.parts(error)))
    error.args = (2,)
    assert EXCEPTION.read(error) != before
    error.__cause__ = cause
    EXCEPTION.put_back(error, kept)
    assert EXCEPTION.read(error) == before
    assert error.__cause__ is None
