"""What a job's `evaluate` has found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from waterflow.report.json_fields import Fields, encode_float


@dataclass(frozen=True)
class Evaluation:
    """What a job's `evaluate` returned after so many steps.

    Attributes:
        step: steps done by then (1, 2, ...).
        values: numbers by their names; a number without one is "value".
    """

    step: int
    values: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON can hold them."""
        values = {name: encode_float(value) for name, value in self.values.items()}
        return {"step": self.step, "values": values}

    @classmethod
    def from_fields(cls, fields: Fields) -> Evaluation:
        """What `to_dict` described; raises ReportError for a wrong field."""
        values = fields.inner("values")
        return cls(fields.integer("step"), {name: values.number(name) for name in values.names})
