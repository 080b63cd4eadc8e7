"""Hyperparameters that stay live in a captured step.

An optimizer computes with Python numbers (``alpha=-lr``, ``1 - beta1 ** step``) and hands the
results to operators, where a trace sees only their values. To keep such a constant up to date, the
optimizer is traced with *traced floats*: numbers of an odd, random value that remember how they
were computed. A constant in the trace whose value is that of a remembered expression in two traces
with different odd values is that expression; everything else must be equal in both. Comparisons are
remembered as guards: the trace holds while they come out the same.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import math
import operator
import random
import struct
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    CodeType,
    FunctionType,
    MethodDescriptorType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

from waterflow.account.bytecode import nested_codes
from waterflow.account.code_names import code_names
from waterflow.account.trust import is_trusted_code, is_trusted_name

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


#: What objects do, whatever number they are; `float.fromhex` and the like ask the class alone.
_OF_ALL_OBJECTS = frozenset(dir(object)) - {
    *("__repr__", "__str__", "__format__", "__hash__", "__reduce__", "__reduce_ex__"),
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
    """The traced floats of one trace.

    Attributes:
        meanings: what each value means.
        guards: the comparisons made.
        lost: what was computed, and then asked for in a way that no expression describes.
    """

    meanings: dict[bytes, list[Expression]] = field(default_factory=dict)
    guards: list[Guard] = field(default_factory=list)
    lost: list[Expression] = field(default_factory=list)

    def number(self, value: float, expression: Expression) -> TracedFloat:
        """A float of that value that remembers the expression."""
        self.meanings.setdefault(bits(value), []).append(expression)
        return TracedFloat(value, expression, self)

    def keys_in(self, expressions: Iterable[Expression]) -> set[Any]:
        """The hyperparameters in these.

        Raises:
            UnfollowableError: there are numbers in them that a tensor holds.
        """
        found = [leaf for expression in expressions for leaf in leaves(expression)]
        if any(leaf[0] == "item" for leaf in found):
            raise UnfollowableError("it may round, write or look up a number of its state")
        return {leaf[1] for leaf in found}

    def all_made(self) -> list[Expression]:
        """All expressions that were computed."""
        return [one for meanings in self.meanings.values() for one in meanings]


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

    def __abs__(self) -> TracedFloat:
        if self > 0.0:
            return self
        if self < 0.0:
            return -self  # type: ignore[return-value]
        return self.lose()  # a zero, or none: without its sign it is no expression

    def __pos__(self) -> TracedFloat:
        return self

    def conjugate(self) -> TracedFloat:
        """The number itself."""
        return self

    @property
    def real(self) -> TracedFloat:
        """The number itself."""
        return self

    @property
    def imag(self) -> float:
        """That of any real number."""
        return 0.0

    def __copy__(self) -> TracedFloat:
        return self

    def __deepcopy__(self, memo: object) -> TracedFloat:
        return self

    def lose(self, *_: Any, **__: Any) -> Any:
        """What is made of it is no traced number, and may be the same for different values: nobody
        would see that it is live."""
        self.trace.lost.append(self.expression)  # where the traced code catches the error, too
        raise UnfollowableError("it rounds, writes or looks up a number that may change")


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


def _compute(symbol: str, *operands: Any) -> Any:
    traced = next(operand for operand in operands if isinstance(operand, TracedFloat))
    if not all(isinstance(operand, (int, float)) for operand in operands):
        return _left_to(traced, operands)
    value = ARITHMETIC[symbol](*(_plain(operand, traced) for operand in operands))
    if isinstance(value, complex):
        return traced.lose()
    return traced.trace.number(value, (symbol, *map(expression_of, operands)))


def _compare(symbol: str, left: TracedFloat, right: Any) -> Any:
    if not isinstance(right, (int, float)):
        return _left_to(left, (right,))
    outcome = COMPARISON[symbol](_plain(left, left), _plain(right, left))
    left.trace.guards.append(Guard(symbol, left.expression, expression_of(right), outcome))
    return outcome


def _plain(number: float, traced: TracedFloat) -> float:
    """A number as a float, be it a traced one."""
    if isinstance(number, float):
        return float.__pos__(number)
    value = float(number)
    return value if value == number else traced.lose()  # of so many digits, no float is the whole


def _left_to(traced: TracedFloat, others: Sequence[Any]) -> Any:
    """What an operator gives for others than numbers: they may have it, too. Those that C has made
    (decimals, fractions, complex numbers, arrays) would take the number as it is."""
    kinds = {type(other) for other in others} - {TracedFloat, int, float, bool}
    if complex not in kinds and not any(map(is_readers_class, kinds)):
        return NotImplemented
    return traced.lose()


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


def _install_losses() -> None:
    """Whatever else floats can do, in this version of Python or another, gives no traced number."""
    names = [*dir(float), "__complex__", "__index__"]
    for name in names:
        if name not in vars(TracedFloat) and name not in _OF_ALL_OBJECTS:
            setattr(TracedFloat, name, TracedFloat.lose)
    setattr(TracedFloat, "__array_ufunc__", None)  # noqa: B010  # numpy's leave operators to it


_install_arithmetic()
_install_losses()


def common_meaning(first: Sequence[Expression], second: Sequence[Expression]) -> Expression | None:
    """The first expression that both traces remember for a constant, or None."""
    return next((expression for expression in first if expression in second), None)


# -- code that may read a number without its knowing: C takes the digits of any float

#: Modules whose functions and classes ask a number in ways that it notices, or not at all; torch's
#: make operators of it, which a trace has.
_HARMLESS = frozenset(
    {"torch", "waterflow", "contextlib", "functools", "itertools", "collections", "_collections"}
    | {"typing", "typing_extensions", "types", "abc", "_abc", "_collections_abc", "warnings"}
    | {"_warnings", "copy", "enum", "dataclasses", "weakref", "_weakref", "inspect", "__future__"}
)
#: Built-in functions that do not.
_READERS = frozenset({"type", "id", "eval", "exec", "compile", "globals", "locals", "vars"})
#: Attributes that lead to a class, or to functions, that do not.
_TO_READERS = frozenset({"__class__", "__mod__", "__getattribute__", "__globals__", "__builtins__"})
_REMAINDERS = frozenset({"%", "%="})


def reader_among(
    codes: Iterable[CodeType], calls: Iterable[tuple[Any, CodeType, int]] = ()
) -> str | None:
    """What of the user's code may make something of a traced float's digits that the float does not
    notice: a remainder that may be a format, an object of C's or a module that it names; None if
    there is nothing.

    Args:
        codes: the code that was executed, or may be.
        calls: the C functions that it called, as `_C.Observer.calls` gives them.
    """
    for function, code, _ in calls:
        if not is_trusted_code(code) and not _is_harmless(function):
            return str(getattr(function, "__qualname__", function))
    own = [code for code in codes if not is_trusted_code(code)]
    spaces = _spaces_of(own)
    for code in own:
        if found := _static_reader(code):
            return found
        if id(code) not in spaces:
            return code.co_qualname
        for name, value in _named(code, spaces[id(code)]):
            if not _is_harmless(value):
                return name
    return None


@functools.lru_cache(maxsize=4096)
def _static_reader(code: CodeType) -> str | None:
    for part in nested_codes(code):
        found = _TO_READERS.intersection(part.co_names)
        if found:
            return min(found)
        for each in dis.get_instructions(part):
            if each.opname == "BINARY_OP" and each.argrepr in _REMAINDERS:
                return each.argrepr
            if each.opname == "IMPORT_NAME" and not _is_harmless_module(str(each.argval)):
                return str(each.argval)
    return None


def _spaces_of(codes: Collection[CodeType]) -> dict[int, list[FunctionType]]:
    """The functions that have each code, or that around it."""
    found: dict[int, list[FunctionType]] = {}
    for holder in gc.get_referrers(*codes) if codes else ():
        if type(holder) is FunctionType:
            for part in nested_codes(holder.__code__):
                found.setdefault(id(part), []).append(holder)
    return found


def _named(code: CodeType, functions: Iterable[FunctionType]) -> Iterator[tuple[str, Any]]:
    """What code can get by its variables' names, or by its defaults."""
    for function in functions:
        for name in code_names(code).global_names:
            if name in function.__globals__:
                yield name, function.__globals__[name]
            elif name in function.__builtins__:  # type: ignore[attr-defined]
                yield name, function.__builtins__[name]  # type: ignore[attr-defined]
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            with contextlib.suppress(ValueError):  # empty yet
                yield name, cell.cell_contents
        given = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        yield from ((function.__qualname__, value) for value in given)


def _is_harmless(value: Any) -> bool:
    """Whether a thing reads no number, or by its methods alone (`TracedFloat`)."""
    if isinstance(value, ModuleType):
        return _is_harmless_module(value.__name__)
    if isinstance(value, FunctionType):
        return not is_trusted_code(value.__code__) or _is_harmless_module(value.__module__ or "")
    if isinstance(value, type):
        return value is not type and not is_readers_class(value)
    if isinstance(value, _OF_C):
        return _is_harmless_in_c(value)
    return not is_readers_class(type(value))


#: Functions of C's, and the methods of its classes.
_OF_C = (
    *(BuiltinFunctionType, MethodDescriptorType, ClassMethodDescriptorType),
    *(WrapperDescriptorType, MethodWrapperType),
)


def _is_harmless_in_c(function: Any) -> bool:
    owner = getattr(function, "__objclass__", None) or getattr(function, "__self__", None)
    if owner is None or isinstance(owner, ModuleType):
        home = owner.__name__ if owner is not None else function.__module__ or ""
        return function.__name__ not in _READERS and _is_harmless_module(home)
    kind = owner if isinstance(owner, type) else type(owner)
    return not (issubclass(kind, (int, float, complex)) or is_readers_class(kind))


def is_readers_class(kind: type) -> bool:
    """Whether objects of a class may take a number as C has it: one of a library, but for torch's
    and those that only hold what they are given."""
    return not all(
        _is_harmless_module(base.__module__) for base in kind.__mro__ if base is not object
    )


def _is_harmless_module(name: str) -> bool:
    root = name.partition(".")[0]
    if root in _HARMLESS or root in ("builtins", "__main__"):
        return True
    if is_trusted_name(name):
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is None or file.endswith(".py")
