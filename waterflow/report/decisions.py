"""What was decided during a run: who rested and why, who was held back, what the budget was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from waterflow.common.errors import ReportError
from waterflow.report.json_fields import Fields, decode_float, encode_float

Kind = Literal["waited", "throttled", "spilled", "other"]

#: How what the engine's recorder says of a job begins.
_KINDS: tuple[tuple[tuple[str, ...], Kind], ...] = (
    (("rests", "goes on", "may need "), "waited"),
    (("works in ",), "throttled"),
    (("its steps copy ",), "spilled"),
)


class Decision(NamedTuple):
    """One decision: seconds since the engine was made, the job ("": all of them), and what."""

    seconds: float
    job: str
    what: str

    @property
    def kind(self) -> Kind:
        """Whether a job waited, was throttled or spilled by it."""
        return next((kind for begins, kind in _KINDS if self.what.startswith(begins)), "other")


def decisions_to_json(decisions: Sequence[Decision]) -> list[list[float | str]]:
    """As JSON can hold them."""
    return [[encode_float(seconds), job, what] for seconds, job, what in decisions]


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
        case [seconds, str(job), str(what)]:
            return Decision(decode_float(seconds), job, what)
    raise ReportError(f"decisions[{place}]: expected seconds, a job and a text, found {item!r:.60}")
