"""Where values come from, as far as bytecode tells: what stands for them on the stack."""

from __future__ import annotations

from collections.abc import Iterable
from types import CodeType
from typing import NamedTuple


class Origin(NamedTuple):
    """Where a value comes from.

    Attributes:
        kind: "held": what is held by a name; "below": what that contains, however deep;
            "parameter": what a function is given by that name; "class": the class of something;
            "unknown".
        name: that name.
        code: whose parameter it is.
    """

    kind: str
    name: str = ""
    code: CodeType | None = None


UNKNOWN = frozenset({Origin("unknown")})
CLASS = frozenset({Origin("class")})
NOTHING = frozenset[Origin]()


class Value(NamedTuple):
    """What is on the stack in place of a value.

    Attributes:
        origins: where it comes from; nothing: it was made here.
        inner: where what it contains comes from, beside what `origins` say.
        method: it is this method of what `origins` say.
        called: the global that it is, or None where it is the stack's null.
        constant: its value, if it is a text; `keywords`: if it is a tuple.
    """

    origins: frozenset[Origin] = NOTHING
    inner: frozenset[Origin] = NOTHING
    method: str = ""
    called: str | None = ""
    constant: str | None = None
    keywords: tuple[str, ...] = ()

    def part(self) -> Value:
        """What it contains."""
        found = self.inner | below(self.origins)
        return Value(found, found)

    def all(self) -> frozenset[Origin]:
        """Where it, and what it contains, come from."""
        return self.origins | self.inner


MADE = Value()
NULL = Value(called=None)
ANY = Value(UNKNOWN, UNKNOWN)


def below(origins: Iterable[Origin]) -> frozenset[Origin]:
    """Where what is contained in values comes from."""
    return frozenset(o._replace(kind="below") if o.kind == "held" else o for o in origins)


def container(values: Iterable[Value]) -> Value:
    """A new one, of these values."""
    return Value(inner=frozenset[Origin]().union(*(value.all() for value in values)))


def either(one: Value, two: Value) -> Value:
    """One of the two, whichever."""
    if one == two:
        return one
    return Value(one.origins | two.origins, one.inner | two.inner)
