"""Traced floats compute like plain ones and remember how."""

from __future__ import annotations

import math
import operator
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@pytest.mark.parametrize(
    "lose",
    [
        *(int, round, math.floor, math.ceil, math.trunc, lambda x: x // 2, lambda x: x % 2),
        *(float, abs, repr, str, "{:.1f}".format, hash, lambda x: {5.5: 1}.get(x)),
        *(lambda x: x.hex(), lambda x: x.is_integer(), lambda x: x.as_integer_ratio()),
    ],
)
def test_rounding_is_refused(lose):
    _, numbers = traced({"a": 5.5})
    with pytest.raises(UnfollowableError, match="rounds"):
        lose(numbers["a"])


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
