"""By how much a guaranteed job was slower beside others than alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from waterflow.report.json_fields import Fields, encode_float


@dataclass
class Slowdown:
    """What comparisons have found of a guaranteed job, each as long as it took.

    Attributes:
        mean: of the slowdown, 0.01 is 1 %.
        error: the standard error of that.
        seconds: that the comparisons took together.
    """

    mean: float = 0.0
    error: float = 0.0
    seconds: float = 0.0

    def add(self, slowdown: float, error: float, seconds: float) -> None:
        """One more comparison, with its standard error and the seconds that it took."""
        before, self.seconds = self.seconds, self.seconds + seconds
        if self.seconds > 0.0:
            self.mean = (before * self.mean + seconds * slowdown) / self.seconds
            self.error = math.hypot(before * self.error, seconds * error) / self.seconds

    def describe(self) -> str:
        """In words."""
        how = "slower" if self.mean >= 0 else "faster"
        return f"{abs(self.mean):.1%} {how} beside others than alone, give or take {self.error:.1%}"

    def to_dict(self) -> dict[str, Any]:
        """Its fields as JSON can hold them."""
        return {name: encode_float(value) for name, value in vars(self).items()}

    @classmethod
    def from_fields(cls, fields: Fields) -> Slowdown:
        """What `to_dict` described; raises ReportError for a wrong field."""
        return cls(fields.number("mean"), fields.number("error"), fields.number("seconds"))
