"""What was decided during a run: who rested and why, who was held back, what the budget was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, cast, get_args

from waterflow.common.errors import ReportError
from waterflow.report.json_fields import Fields, decode_float, encode_float

Kind = Literal["waited", "throttled", "spilled", "other"]


class Decision(NamedTuple):
    """One decision: seconds since the engine was made, the job ("": all of them), and what; and
    whether a job waits, is throttled or spills by it, or comes back."""

    seconds: float
    job: str
    what: str
    kind: Kind = "other"


def decisions_to_json(decisions: Sequence[Decision]) -> list[list[float | str]]:
    """As JSON can hold them."""
    return [[encode_float(seconds), *rest] for seconds, *rest in decisions]


def decisions_from(fields: Fields) -> list[Decision]:
    """What `decisions_to_json` wrote; none in a report of before there were any.

    Raises:
        ReportError: one of them is none.
    """
    if not fields.has("decisions"):
        return []
    return [_decision(place, item) for place, item in enumerate(fields.items("decisions"))]


def _decision(place: int, item: object) -> Decision:
    match item:
        case [seconds, str(job), str(what)]:  # of before they had kinds
            return Decision(decode_float(seconds), job, what)
        case [seconds, str(job), str(what), str(kind)] if kind in get_args(Kind):
            return Decision(decode_float(seconds), job, what, cast(Kind, kind))
    raise ReportError(
        f"decisions[{place}]: expected seconds, a job, a text and one of "
        f"{', '.join(get_args(Kind))}, found {item!r:.60}"
    )
