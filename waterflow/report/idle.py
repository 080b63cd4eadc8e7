"""Why lanes have run no step while jobs flowed, and for how many of their seconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from waterflow.common.units import format_seconds
from waterflow.report.json_fields import Fields

IdleReason = Literal["data", "memory", "python", "jobs"]

#: Less than this share of the lanes' time is not worth a word.
_MUCH = 0.1


def idle_from(fields: Fields) -> dict[IdleReason, float]:
    """What `Report.to_json` wrote."""
    idle = fields.inner("idle_seconds")
    return {reason: idle.number(reason) for reason in get_args(IdleReason) if idle.has(reason)}


def idle_text(idle: Mapping[IdleReason, float], lane_seconds: float) -> str:
    """What to tell of it, empty if that is nothing.

    Args:
        idle: seconds by reason.
        lane_seconds: the run's time, of all lanes together.
    """
    if sum(idle.values()) <= _MUCH * lane_seconds:
        return ""
    times = sorted(idle.items(), key=lambda item: -item[1])
    return "lanes waited for " + ", ".join(f"{why} {format_seconds(took)}" for why, took in times)
