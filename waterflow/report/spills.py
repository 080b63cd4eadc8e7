"""What a job's steps were planned into, and what that made them copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from waterflow.common.errors import ReportError
from waterflow.common.units import format_bytes
from waterflow.report.json_fields import Fields, decode_float, encode_float


class Spill(NamedTuple):
    """A limit of a job from some moment on.

    Attributes:
        seconds: when, since the engine was made.
        limit: bytes that the job may need, taking its steps alone; None: any.
        copied_bytes: what a step copies out and back, of the steps known by then the one that
            copies most; 0: none has to.
        away_bytes: what of the model and the optimizer's state is not in the budget between steps.
        tier: where values go: "memory" or "disk".
    """

    seconds: float
    limit: int | None
    copied_bytes: int
    away_bytes: int
    tier: str

    def describe(self) -> str:
        """In a line, for people."""
        if self.limit is None:
            return "its steps copy nothing, as there is no limit any more"
        within = f"within {format_bytes(self.limit)}"
        if not self.copied_bytes:
            return f"its steps copy nothing, {within}"
        away = f", {format_bytes(self.away_bytes)} there between steps" if self.away_bytes else ""
        copied = format_bytes(self.copied_bytes)
        return f"its steps copy {copied} to {self.tier} and back, {within}{away}"


def spills_to_json(spills: Sequence[Spill]) -> list[dict[str, object]]:
    """As JSON can hold them."""
    return [{**spill._asdict(), "seconds": encode_float(spill.seconds)} for spill in spills]


def spills_from(fields: Fields) -> list[Spill]:
    """What `spills_to_json` wrote; none in a report of before there were any.

    Raises:
        ReportError: one of them is none.
    """
    if not fields.has("spills"):
        return []
    found = [Fields(one, f"spills[{n}].") for n, one in enumerate(fields.items("spills"))]
    return [
        Spill(
            one.number("seconds"),
            one.integer_or_none("limit"),
            one.integer("copied_bytes"),
            one.integer("away_bytes"),
            one.text("tier"),
        )
        for one in found
    ]


def speeds_to_json(speeds: Sequence[tuple[int, float]]) -> list[list[object]]:
    """`JobReport.memory_speeds` as JSON can hold them."""
    return [[limit, encode_float(speed)] for limit, speed in speeds]


def speeds_from(fields: Fields) -> list[tuple[int, float]]:
    """What `speeds_to_json` wrote; none in a report of before there were any.

    Raises:
        ReportError: one of them is none.
    """
    if not fields.has("memory_speeds"):
        return []
    return [_speed(n, item) for n, item in enumerate(fields.items("memory_speeds"))]


def _speed(place: int, item: object) -> tuple[int, float]:
    match item:
        case [int(limit), speed]:
            return limit, decode_float(speed)
    raise ReportError(f"memory_speeds[{place}]: expected bytes and steps/s, found {item!r:.60}")
