"""Reading and writing a JSON object field by field, so that an error names the field.

JSON has no NaN and no infinity, and a diverged job has both among its losses: they travel as the
texts "nan", "inf" and "-inf", only in the fields that hold numbers.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

from waterflow.common.errors import ReportError

T = TypeVar("T")

_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode_float(value: float) -> float | str:
    """Return `value` as JSON can hold it: itself, or "nan", "inf", "-inf"."""
    value = float(value)
    return value if math.isfinite(value) else str(value)


def decode_float(value: object) -> float:
    """Return the number that `encode_float` was given; raises ReportError if it is none."""
    if isinstance(value, str) and value in _SPECIAL:
        return _SPECIAL[value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise ReportError(f"expected a number, found {_short(value)}")


class Fields:
    """A JSON object under a name; each reader raises ReportError with the field's path."""

    def __init__(self, value: object, path: str) -> None:
        """Take the object `value`; raises ReportError if it is something else."""
        if not isinstance(value, dict):
            raise ReportError(
                f"{path or 'the document'}: expected an object, found {_short(value)}"
            )
        self._values: dict[str, Any] = value
        self._path = path

    def _get(self, key: str, kind: type[T]) -> T:
        if key not in self._values:
            raise ReportError(f"{self._path}{key} is missing")
        value = self._values[key]
        # bool is an int to Python, but `"steps": true` is a mistake.
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ReportError(f"{self._path}{key}: expected {kind.__name__}, found {_short(value)}")
        return value

    def has(self, key: str) -> bool:
        """Whether the field is there."""
        return key in self._values

    @property
    def names(self) -> list[str]:
        """The names of all fields."""
        return list(self._values)

    def _is_null(self, key: str) -> bool:
        return key in self._values and self._values[key] is None

    def text(self, key: str) -> str:
        """Return a text."""
        return self._get(key, str)

    def integer(self, key: str) -> int:
        """Return a whole number."""
        return self._get(key, int)

    def flag(self, key: str) -> bool:
        """Return true or false."""
        return self._get(key, bool)

    def number(self, key: str) -> float:
        """Return a number, NaN and infinities included."""
        return self._located(key, self._get(key, object))

    def text_or_none(self, key: str) -> str | None:
        """Return a text, or None for null."""
        return None if self._is_null(key) else self.text(key)

    def integer_or_none(self, key: str) -> int | None:
        """Return a whole number, or None for null."""
        return None if self._is_null(key) else self.integer(key)

    def numbers(self, key: str) -> list[float]:
        """Return a list of numbers, NaN and infinities included."""
        return [self._located(key, value) for value in self.items(key)]

    def integers(self, key: str) -> list[int]:
        """Return a list of whole numbers."""
        values = self.items(key)
        if not all(type(value) is int for value in values):
            raise ReportError(f"{self._path}{key}: expected a list of whole numbers")
        return values

    def texts(self, key: str) -> list[str]:
        """Return a list of texts."""
        values = self.items(key)
        if not all(isinstance(value, str) for value in values):
            raise ReportError(f"{self._path}{key}: expected a list of texts")
        return values

    def items(self, key: str) -> list[Any]:
        """Return a list of anything."""
        return self._get(key, list)

    def inner(self, key: str) -> Fields:
        """Return an object."""
        return Fields(self._get(key, dict), f"{self._path}{key}.")

    def inner_or_none(self, key: str) -> Fields | None:
        """Return an object, or None for null."""
        return None if self._is_null(key) else self.inner(key)

    def text_map(self, key: str) -> dict[str, str]:
        """Return an object whose values are all texts."""
        inner = self.inner(key)
        return {name: inner.text(name) for name in inner._values}

    def number_lists(self, key: str) -> dict[str, list[float]]:
        """Return an object whose values are all lists of numbers."""
        inner = self.inner(key)
        return {name: inner.numbers(name) for name in inner._values}

    def _located(self, key: str, value: object) -> float:
        try:
            return decode_float(value)
        except (ReportError, OverflowError) as error:
            raise ReportError(f"{self._path}{key}: {error}") from None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
