"""Traced floats compute like plain ones and remember how."""

from __future__ import annotations

import contextlib
import copy
import decimal
import fractions
import math
import operator
import pickle
import random
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from waterflow.account.purity import observer
from waterflow.capture.traced_floats import (
    ARITHMETIC,
    COMPARISON,
    FloatTrace,
    TracedFloat,
    UnfollowableError,
    bits,
    common_meaning,
    evaluate,
    expression_of,
    holds,
    leaves,
    odd_value,
    reader_among,
    traceable,
)

NUMBERS = st.floats(-50, 50, allow_nan=False).filter(lambda x: x == 0 or abs(x) > 1e-3)
VALUES = st.dictionaries(st.sampled_from("abc"), NUMBERS, min_size=3, max_size=3)
OPERATIONS = {"n": operator.neg, **{symbol: ARITHMETIC[symbol] for symbol in "+-*/"}}


@st.composite
def programs(draw, depth=4):
    """A computation over numbers a, b, c as nested tuples."""
    if depth == 0 or draw(st.booleans()):
        return draw(st.one_of(st.sampled_from("abc"), NUMBERS, st.integers(-5, 5)))
    symbol = draw(st.sampled_from(sorted(OPERATIONS)))
    count = 1 if symbol == "n" else 2
    return symbol, *(draw(programs(depth=depth - 1)) for _ in range(count))


def run(program, numbers):
    if isinstance(program, str):
        return numbers[program]
    if not isinstance(program, tuple):
        return program
    return OPERATIONS[program[0]](*(run(part, numbers) for part in program[1:]))


def plain(number):
    """Of a traced float, too, which refuses to be made one."""
    return float.__pos__(number) if isinstance(number, float) else float(number)


def traced(values):
    trace = FloatTrace()
    return trace, {key: trace.number(v, ("hyper", key)) for key, v in values.items()}


@given(programs(), VALUES, VALUES)
def test_an_expression_evaluates_like_the_plain_computation(program, values, others):
    _, numbers = traced(values)
    try:
        expected = run(program, values)
        result = run(program, numbers)
        elsewhere = run(program, others)
    except (ZeroDivisionError, OverflowError):
        return
    assert bits(plain(result)) == bits(float(expected))
    if isinstance(result, TracedFloat):
        assert bits(evaluate(result.expression, values)) == bits(float(expected))
        try:
            replayed = evaluate(result.expression, others)
        except (ZeroDivisionError, OverflowError):
            return
        assert bits(replayed) == bits(float(elsewhere))


@given(st.floats(0.1, 0.999), st.floats(1, 500))
def test_powers(base, exponent):
    _, numbers = traced({"a": base, "b": exponent, "c": 2.0})
    value = 1 - numbers["a"] ** numbers["b"]
    assert bits(value) == bits(1 - base**exponent)
    assert bits(evaluate(value.expression, {"a": base, "b": exponent})) == bits(plain(value))
    assert bits(evaluate((2 ** numbers["c"]).expression, {"c": 2.0})) == bits(4.0)


@given(st.sampled_from(sorted(COMPARISON)), NUMBERS, NUMBERS, NUMBERS)
def test_guards_hold_exactly_while_the_comparison_comes_out_the_same(symbol, left, right, later):
    trace, numbers = traced({"a": left, "b": right, "c": 1.0})
    outcome = COMPARISON[symbol](numbers["a"], numbers["b"])
    assert outcome == COMPARISON[symbol](left, right)
    (guard,) = trace.guards
    assert holds(guard, {"a": left, "b": right})
    assert holds(guard, {"a": later, "b": right}) == (COMPARISON[symbol](later, right) == outcome)


def test_truth_is_a_guard():
    trace, numbers = traced({"a": 0.5})
    assert numbers["a"]
    (guard,) = trace.guards
    assert not holds(guard, {"a": 0.0})


LOSSES = {
    **{name: getattr(math, name) for name in ("floor", "ceil", "trunc")},
    **{each.__name__: each for each in (int, float, complex, round, repr, str, format, hash)},
    "//": lambda x: x // 2,
    "%": lambda x: 2 % x,
    "divmod": lambda x: divmod(x, 2),
    "format 1": "{:.1f}".format,
    "dict": lambda x: {5.5: 1}.get(x),
    "set": lambda x: x in {1.0},
    "hex": lambda x: x.hex(),
    "is_integer": lambda x: x.is_integer(),
    "ratio": lambda x: x.as_integer_ratio(),
    "pickle": pickle.dumps,
    "fraction": fractions.Fraction,
    "compared with a fraction": lambda x: fractions.Fraction(1, 3) < x,
    "compared with a decimal": lambda x: x < decimal.Decimal("0.3"),
    "times a complex": lambda x: x * 2j,
    "complex": lambda x: (-x) ** 0.5,
    "plus many digits": lambda x: x + (2**53 + 1),
}


@pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES)
def test_what_is_no_traced_number_is_refused_and_known(lose):
    trace, numbers = traced({"a": 5.5})
    with pytest.raises(UnfollowableError, match="rounds"):
        lose(numbers["a"])
    assert trace.keys_in(trace.lost) == {"a"}


def test_whatever_floats_can_do_is_traced_or_refused():
    of_floats = {name for name in dir(float) if name not in dir(object)}
    assert of_floats <= vars(TracedFloat).keys()


def test_what_stays_traced():
    _, numbers = traced({"a": -5.5})
    number = numbers["a"]
    assert abs(number).expression == ("n", ("hyper", "a"))
    assert (+number) is number.real is number.conjugate() is copy.deepcopy(number) is number
    assert number.imag == 0.0
    assert number != "x" and number != None  # noqa: E711, PT018
    assert bits(np.float64(2.0) * number) == bits(-11.0)


def test_numbers_of_the_state_cannot_be_fixed():
    trace = FloatTrace()
    with pytest.raises(UnfollowableError):
        int(trace.number(0.5, ("item", "x")))
    with pytest.raises(UnfollowableError, match="state"):
        trace.keys_in(trace.lost)


def _readers():
    way = math.frexp
    pattern = struct.Struct("d")
    return {
        "global": lambda f: math.frexp(f)[1],
        "variable": lambda f: way(f)[1],
        "default": lambda f, way=way: way(f)[1],
        "object": lambda f: pattern.pack(f)[6],
        "class": lambda f: float(decimal.Decimal(f)),
        "type": lambda f: type(f) is float,
        "__class__": lambda f: f.__class__ is float,
        "text": lambda f: "%.1f" % f,  # noqa: UP031
        "numpy": lambda f: np.round(f, 1),
        "method": lambda f: float.__round__(f),
    }


@pytest.mark.parametrize("name", _readers())
def test_code_that_reads_numbers_behind_their_back(name):
    function = _readers()[name]
    with observer() as seen, contextlib.suppress(UnfollowableError):
        function(traced({"a": 5.5})[1]["a"])
    assert reader_among(seen.codes(), seen.calls()) is not None


def test_functions_in_attributes_are_seen_when_called():
    held = {"way": math.frexp}

    def reads(f):
        return held["way"](f)

    with observer() as seen:
        reads(5.5)
    assert reader_among(seen.codes()) is None
    assert reader_among(seen.codes(), seen.calls()) == "frexp"


def test_arithmetic_reads_nothing():
    def plain(f, tensor, *, limits=(0.1, 0.9)):
        if isinstance(f, float) and f is not None and not torch.is_grad_enabled():
            return None
        values = [max(min(f, limit), sum(limits)) for limit in limits]
        return tensor.mul_(values[0]).add_(torch.zeros_like(tensor), alpha=-f), len(values)

    with observer() as seen:
        plain(5.5, torch.ones(2))
    assert reader_among(seen.codes(), seen.calls()) is None


@given(st.floats(1e-8, 1e6), st.integers(0, 100))
def test_an_odd_value_is_near(value, seed):
    one, other = odd_value(value, random.Random(seed)), odd_value(value, random.Random(seed + 1))
    assert one != other
    assert 0.98 * value < one < value
    assert one > 0
    assert value > 1 or one < 1


def test_what_can_be_traced():
    assert all(map(traceable, (0.1, -2.0, 1.0)))
    assert not any(map(traceable, (0.0, 1, True, None, math.inf, math.nan, "x")))


def test_leaves_and_meanings():
    trace, numbers = traced({"a": 0.5, "b": 2.0})
    value = -(numbers["a"] * 3 + numbers["b"])
    assert leaves(value.expression) == [("hyper", "a"), ("hyper", "b")]
    assert trace.meanings[bits(value)] == [value.expression]
    assert expression_of(3) == ("number", 3.0)
    assert common_meaning([("a",), ("b",)], [("b",)]) == ("b",)
    assert common_meaning([("a",)], [("b",)]) is None
