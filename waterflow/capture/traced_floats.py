"""Hyperparameters that stay live in a captured step.

An optimizer computes with Python numbers (``alpha=-lr``, ``1 - beta1 ** step``) and hands the
results to operators, where a trace sees only their values. To keep such a constant up to date, the
optimizer is traced with *traced floats*: numbers of an odd, random value that remember how they
were computed. A constant in the trace whose value is that of a remembered expression in two traces
with different odd values is that expression; everything else must be equal in both. Comparisons are
remembered as guards: the trace holds while they come out the same.
"""

from __future__ import annotations

import math
import operator
import random
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: An expression: ``("hyper", key)``, ``("item", name)``, ``("number", x)`` or ``(operator, a, b)``.
Expression = tuple[Any, ...]

ARITHMETIC: Mapping[str, Callable[..., float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "^": operator.pow,
    "n": operator.neg,
}

COMPARISON: Mapping[str, Callable[[float, float], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


class UnfollowableError(TypeError):
    """A computation with a traced float that no expression describes.

    Never a user's: it ends a trace, and the optimizer runs eagerly.
    """


@dataclass(frozen=True)
class Guard:
    """A comparison that the traced code made, and how it came out."""

    comparison: str
    left: Expression
    right: Expression
    outcome: bool


@dataclass
class FloatTrace:
    """The traced floats of one trace: what each value means, and the comparisons made."""

    meanings: dict[bytes, list[Expression]] = field(default_factory=dict)
    guards: list[Guard] = field(default_factory=list)

    def number(self, value: float, expression: Expression) -> TracedFloat:
        """A float of that value that remembers the expression."""
        self.meanings.setdefault(bits(value), []).append(expression)
        return TracedFloat(value, expression, self)


class TracedFloat(float):
    """A float that remembers how it was computed, and in which trace."""

    expression: Expression
    trace: FloatTrace

    def __new__(cls, value: float, expression: Expression, trace: FloatTrace) -> TracedFloat:
        """A number of `value`; see `FloatTrace.number`."""
        self = super().__new__(cls, value)
        self.expression = expression
        self.trace = trace
        return self

    def __bool__(self) -> bool:
        return _compare("!=", self, 0.0)

    def __pos__(self) -> TracedFloat:
        return self

    @property
    def real(self) -> TracedFloat:
        """The number itself."""
        return self

    def conjugate(self) -> TracedFloat:
        """The number itself."""
        return self

    def _lost(self, *_: Any) -> Any:
        """Rounding gives equal numbers for different values: nobody would see that it is live. So
        do a text of some digits and a place in a table, and a plain number may be rounded later."""
        raise UnfollowableError("it rounds, or looks up, a number that changes from step to step")

    __int__ = __trunc__ = __floor__ = __ceil__ = __round__ = __float__ = __hash__ = _lost
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __divmod__ = __rdivmod__ = _lost
    __abs__ = __repr__ = __str__ = __format__ = hex = as_integer_ratio = is_integer = _lost


def bits(value: float) -> bytes:
    """The exact identity of a float (distinguishes -0.0 from 0.0, equals NaN to itself)."""
    return struct.pack("<d", value)


def expression_of(value: float) -> Expression:
    """The expression of a traced float; a plain number stands for itself."""
    if isinstance(value, TracedFloat):
        return value.expression
    return ("number", float(value))


def leaves(expression: Expression) -> list[Expression]:
    """The ``hyper`` and ``item`` leaves of an expression."""
    if expression[0] in ("hyper", "item"):
        return [expression]
    if expression[0] == "number":
        return []
    return [leaf for part in expression[1:] for leaf in leaves(part)]


def evaluate(expression: Expression, values: Mapping[Any, float]) -> float:
    """The value of an expression without ``item`` leaves, hyperparameters taken from `values`."""
    head = expression[0]
    if head == "hyper":
        return values[expression[1]]
    if head == "number":
        return expression[1]
    return ARITHMETIC[head](*(evaluate(part, values) for part in expression[1:]))


def holds(guard: Guard, values: Mapping[Any, float]) -> bool:
    """Whether the comparison comes out as it did in the trace."""
    left, right = evaluate(guard.left, values), evaluate(guard.right, values)
    return COMPARISON[guard.comparison](left, right) == guard.outcome


def odd_value(value: float, rng: random.Random) -> float:
    """A value near `value`, on the same side of 0 and 1, whose bits nobody else has."""
    return value * (1.0 - rng.uniform(0.004, 0.015))


def traceable(value: Any) -> bool:
    """Whether a hyperparameter's value can be a traced float: a finite, non-zero float."""
    return type(value) is float and math.isfinite(value) and value != 0.0


def _plain(value: float) -> float:
    """The number that a float is, be it a traced one."""
    return float.__pos__(value) if isinstance(value, float) else float(value)


def _compute(symbol: str, *operands: float) -> Any:
    if not all(isinstance(operand, (int, float)) for operand in operands):
        return NotImplemented
    value = ARITHMETIC[symbol](*map(_plain, operands))
    if isinstance(value, complex):
        return value
    trace = next(operand.trace for operand in operands if isinstance(operand, TracedFloat))
    return trace.number(value, (symbol, *map(expression_of, operands)))


def _compare(symbol: str, left: TracedFloat, right: Any) -> Any:
    if not isinstance(right, (int, float)):
        return NotImplemented
    outcome = COMPARISON[symbol](_plain(left), _plain(right))
    left.trace.guards.append(Guard(symbol, left.expression, expression_of(right), outcome))
    return outcome


def _install_arithmetic() -> None:
    names = {"+": "add", "-": "sub", "*": "mul", "/": "truediv", "^": "pow"}
    for symbol, name in names.items():

        def forward(self: TracedFloat, other: Any, *_: Any, symbol: str = symbol) -> Any:
            return _compute(symbol, self, other)

        def reflected(self: TracedFloat, other: Any, *_: Any, symbol: str = symbol) -> Any:
            return _compute(symbol, other, self)

        setattr(TracedFloat, f"__{name}__", forward)
        setattr(TracedFloat, f"__r{name}__", reflected)
    comparisons = {"==": "eq", "!=": "ne", "<": "lt", "<=": "le", ">": "gt", ">=": "ge"}
    for symbol, name in comparisons.items():

        def compare(self: TracedFloat, other: Any, symbol: str = symbol) -> Any:
            return _compare(symbol, self, other)

        setattr(TracedFloat, f"__{name}__", compare)
    setattr(TracedFloat, "__neg__", lambda self: _compute("n", self))  # noqa: B010


_install_arithmetic()


def common_meaning(first: Sequence[Expression], second: Sequence[Expression]) -> Expression | None:
    """The first expression that both traces remember for a constant, or None."""
    return next((expression for expression in first if expression in second), None)
