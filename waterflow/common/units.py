"""Sizes and durations as people write and read them.

Binary (KiB, MiB, GiB, TiB) and decimal (KB, MB, GB, TB) units are kept apart, and a bare "G" is
refused: a budget that is 7 % off because of a guess shows up hours later, as an out-of-memory
error.
"""

from __future__ import annotations

import operator
import re
from fractions import Fraction
from typing import SupportsIndex

from waterflow.common.errors import JobError

_FACTORS = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)},
}
_SIZE = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,30})?|\.[0-9]{1,30})\s*([a-z]*)", re.ASCII)
_EXAMPLES = 'for example "512MiB", "1.5GB" or 1048576 (bytes)'
_LARGEST = 2**63 - 1  # the allocator counts in signed 64-bit integers


def parse_bytes(value: str | SupportsIndex) -> int:
    """Return `value` in bytes, rounded down.

    `value` is a number of bytes or a text such as "512MiB", "0.5 GiB" or "1.5GB"; upper and lower
    case are the same. Raises JobError, which names the value, for anything else and for less than
    one byte.
    """
    size = _parse_text(value) if isinstance(value, str) else _parse_number(value)
    if not 1 <= size <= _LARGEST:
        raise JobError(f"a size must be from 1 byte to 2^63-1, not {value!r}: write {_EXAMPLES}")
    return size


def _parse_text(text: str) -> int:
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None:
        raise JobError(f"cannot read {text!r} as a size: write {_EXAMPLES}")
    number, unit = match.groups()
    if unit not in _FACTORS:
        raise JobError(
            f"cannot read {text!r} as a size: the unit is one of B, KiB, MiB, GiB, TiB "
            f"(powers of 1024), KB, MB, GB, TB (powers of 1000), {_EXAMPLES}"
        )
    # Fractions, because 0.1 * 10**12 in floats can land one byte beside what was written.
    return int(Fraction(number) * _FACTORS[unit])


def _parse_number(value: SupportsIndex) -> int:
    try:
        if not isinstance(value, bool):  # True is the integer 1 to Python, never a size to people
            return operator.index(value)
    except TypeError:
        pass
    raise JobError(f"a size cannot be {value!r} ({type(value).__name__}): write {_EXAMPLES}")


def format_bytes(size: float, decimals: int = 1) -> str:
    """Return `size`, in bytes, in the largest fitting binary unit: "512.0 MiB"."""
    if abs(size) < 1024:
        return f"{size:.0f} B"
    value = float(size)
    most = 1024 - 0.5 * 10**-decimals  # what would print as 1024.0 belongs to the next unit
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if abs(value) < most:
            return f"{value:.{decimals}f} {unit}"
    return f"{value / 1024:.{decimals}f} TiB"


def unit_of(size: float) -> tuple[str, float]:
    """The unit in which `format_bytes` writes a size, and its bytes: ("MiB", 1048576.0)."""
    name = format_bytes(size).split()[-1]
    return name, 1024.0 ** ("B", "KiB", "MiB", "GiB", "TiB").index(name)


_SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "sec": 1.0, "second": 1.0, "m": 60.0, "min": 60.0}
_SECONDS |= {"minute": 60.0, "h": 3600.0, "hour": 3600.0, "d": 86400.0, "day": 86400.0}
_TIME = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([a-z]*)", re.ASCII)


def parse_seconds(value: float | str) -> float:
    """Seconds, from a number of them or a text such as "30s", "5min", "2h" or "250ms".

    Raises:
        JobError: it is no time; names the value.
    """
    if type(value) in (int, float):
        return float(value)
    match = _TIME.fullmatch(value.strip().lower()) if isinstance(value, str) else None
    unit = "" if match is None else match[2]
    unit = unit if unit in _SECONDS else unit.removesuffix("s")
    if match is None or unit not in _SECONDS:
        raise JobError(
            f"{value!r} is no time: write a number of seconds, or a text such as '30s' or '5min'"
        )
    return float(match[1]) * _SECONDS[unit]


def format_seconds(seconds: float) -> str:
    """Return a duration, given in seconds: "3.2 ms", "12.3 s", "4 min 05 s", "2 h 03 min"."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    if not seconds < float("inf"):
        return f"{seconds} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"
