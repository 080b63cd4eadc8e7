"""What became of one job of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

from waterflow.common.errors import JobFailedError, ReportError
from waterflow.report.epoch_means import Precision, epoch_means
from waterflow.report.evaluation import Evaluation
from waterflow.report.json_fields import Fields, encode_float
from waterflow.report.slowdown import Slowdown
from waterflow.report.spills import Spill, speeds_from, speeds_to_json, spills_from, spills_to_json
from waterflow.report.step_loss import StepLoss, metrics_of

State = Literal["queued", "running", "suspended", "finished", "stopped", "failed", "out_of_memory"]


@dataclass(kw_only=True)
class JobReport:
    """What became of one job.

    `losses` holds one number per step, `metrics` as many of each metric that its steps have told
    (NaN for steps that have not), `peak_bytes` the most it held in this run, `solo_peak_bytes`
    the most one step holds when the job runs alone, `persistent_bytes` its share between steps.
    `exception` is the live error of a failed job; a report read from a file has only its text.
    `epoch_ends` says how many steps had been made when each epoch was over, `epochs` of them.
    `captured` is "captured", "opaque optimizer", "opaque step", or "eager" where no capture was
    worth its time (and for the plain loop); `notes` and `tiers` say why. `checks` counts the steps
    whose captured form was compared with the eager step,
    `eager_steps` those that ran as eager Python (these among them), `recaptures` the captures made
    because something that the step reads had changed. `capture_seconds` is what captures took, and
    `capture_shared_with` names the job whose capture the latest is, where it was not made anew.
    `resumed_steps` are those of `steps` that an earlier run has made, from whose checkpoint the job
    went on; times and bytes are of this run. `evaluations` are what `Job.evaluate` has found.
    `spills` says which limit its steps were planned into when, and what they copied;
    `memory_speeds` how many steps a second it made under the limits in bytes that were tried where
    opportunistic jobs shared too little memory, in this order. `slowdown` is what a guaranteed job
    lost by those beside it, as measured; None where it was compared with nobody.
    """

    name: str
    state: State = "queued"
    error: str | None = None
    error_type: str | None = None
    losses: list[float] = field(default_factory=list)
    metrics: dict[str, list[float]] = field(default_factory=dict)
    steps: int = 0
    epochs: int = 0
    epoch_ends: list[int] = field(default_factory=list)
    solo_peak_bytes: int | None = None
    persistent_bytes: int | None = None
    peak_bytes: int = 0
    wall_seconds: float = 0.0
    captured: str = "captured"
    notes: list[str] = field(default_factory=list)
    tiers: list[str] = field(default_factory=list)
    checks: int = 0
    eager_steps: int = 0
    recaptures: int = 0
    capture_seconds: float = 0.0
    capture_shared_with: str | None = None
    seed: int | None = None
    resumed_steps: int = 0
    spills: list[Spill] = field(default_factory=list)
    memory_speeds: list[tuple[int, float]] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    slowdown: Slowdown | None = None
    exception: BaseException | None = field(default=None, repr=False, compare=False)

    @property
    def steps_per_second(self) -> float:
        """Steps per second of the job's wall time; 0 before it has run."""
        return (
            (self.steps - self.resumed_steps) / self.wall_seconds if self.wall_seconds > 0 else 0.0
        )

    @property
    def nonfinite_step(self) -> int | None:
        """The first step whose loss was NaN or infinite, counted from 1; None if none was."""
        bad = (n for n, loss in enumerate(self.losses, 1) if not math.isfinite(loss))
        return next(bad, None)

    @property
    def loss_note(self) -> str | None:
        """What `notes` say of losses that are no numbers; None where there are none."""
        step = self.nonfinite_step
        if step is None:
            return None
        after = self.losses[step - 1 :]
        bad = sum(not math.isfinite(loss) for loss in after)
        rest = "as all after it were NaN or infinite"
        if len(after) == 1:
            rest = "the last one"
        elif bad < len(after):
            rest = f"as {bad - 1} of the {len(after) - 1} after it were NaN or infinite"
        return f"the loss of step {step} was {after[0]}, {rest}"

    def error_to_raise(self) -> BaseException | None:
        """The job's error, with a note that says whose it is; None where it has not failed.

        Where the run was in this process it is the one that was raised, with its traceback.
        """
        if self.ok:
            return None
        error = self.exception
        if error is None:
            text = f"job {self.name!r} failed: {self.error_type or 'error'}: {self.error}"
            return JobFailedError(text)
        note = f"job {self.name!r} failed with this after {self.steps} steps"
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        return error

    @property
    def ok(self) -> bool:
        """Whether the job ended without an error."""
        return self.state not in ("failed", "out_of_memory")

    def note_losses(self, losses: Sequence[float]) -> None:
        """Takes down the losses of the steps that follow, with their metrics."""
        if not (self.metrics or StepLoss in map(type, losses)):
            self.losses += losses
            return
        for loss in losses:
            told = metrics_of(loss)
            for name in told.keys() - self.metrics.keys():
                self.metrics[name] = [math.nan] * len(self.losses)
            for name, values in self.metrics.items():
                values.append(told.get(name, math.nan))
            self.losses.append(float(loss))

    def note_epoch(self, steps: int) -> None:
        """Takes down that an epoch is over after so many steps."""
        self.epochs += 1
        self.epoch_ends.append(steps)

    def epoch_means(
        self, weight: str | None = None, *, precision: Precision = "float64"
    ) -> list[dict[str, float]]:
        """The means over each epoch of the loss (as "loss") and of each metric, as loops that add
        them up step by step print them.

        A metric of the name "loss" takes the loss's place. A metric that not all of an epoch's
        steps have told is NaN there, as one of them was.

        Args:
            weight: the metric that tells each step's weight, such as its batch's size: return
                ``(loss, {"samples": len(batch), ...})`` and say ``"samples"``. It has no mean
                itself. None: all steps weigh the same.
            precision: of values, products and sums, in the steps' order: "float64" is what loops
                have that add up numbers (``.item()``), "float32" those that add up tensors.

        Returns:
            A dictionary per epoch. The last may be of an epoch that was not gone through.

        Raises:
            ReportError: no step has told that weight, or an epoch's end is not known, as in
                reports of older versions.
        """
        if len(self.epoch_ends) != self.epochs:
            raise ReportError(
                f"job {self.name!r}: its report, or the checkpoint that it went on from, is of an "
                "older version, which did not tell after which step each epoch ended"
            )
        made = len(self.losses)
        ends = [end for end in self.epoch_ends if end <= made]
        if made > max(ends, default=0):
            ends.append(made)
        columns = {"loss": self.losses, **self.metrics}
        return epoch_means(columns, ends, weight, precision)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON can hold them, without the live exception."""
        return {
            "name": self.name,
            "state": self.state,
            "error": self.error,
            "error_type": self.error_type,
            "losses": [encode_float(loss) for loss in self.losses],
            "metrics": {
                name: [encode_float(value) for value in values]
                for name, values in self.metrics.items()
            },
            "steps": self.steps,
            "epochs": self.epochs,
            "epoch_ends": list(self.epoch_ends),
            "solo_peak_bytes": self.solo_peak_bytes,
            "persistent_bytes": self.persistent_bytes,
            "peak_bytes": self.peak_bytes,
            "wall_seconds": encode_float(self.wall_seconds),
            "steps_per_second": encode_float(self.steps_per_second),
            "captured": self.captured,
            "notes": list(self.notes),
            "tiers": list(self.tiers),
            "checks": self.checks,
            "eager_steps": self.eager_steps,
            "recaptures": self.recaptures,
            "capture_seconds": encode_float(self.capture_seconds),
            "capture_shared_with": self.capture_shared_with,
            "seed": self.seed,
            "resumed_steps": self.resumed_steps,
            "spills": spills_to_json(self.spills),
            "memory_speeds": speeds_to_json(self.memory_speeds),
            "evaluations": [evaluation.to_dict() for evaluation in self.evaluations],
            "slowdown": None if self.slowdown is None else self.slowdown.to_dict(),
        }

    @classmethod
    def from_fields(cls, fields: Fields) -> JobReport:
        """Return the job that `to_dict` described; raises ReportError for a wrong field."""
        state = fields.text("state")
        if state not in get_args(State):
            raise ReportError(f"state: expected one of {', '.join(get_args(State))}, not {state!r}")
        return cls(
            name=fields.text("name"),
            state=cast(State, state),
            error=fields.text_or_none("error"),
            error_type=fields.text_or_none("error_type"),
            losses=fields.numbers("losses"),
            metrics=fields.number_lists("metrics") if fields.has("metrics") else {},
            steps=fields.integer("steps"),
            epochs=fields.integer("epochs"),
            epoch_ends=fields.integers("epoch_ends") if fields.has("epoch_ends") else [],
            solo_peak_bytes=fields.integer_or_none("solo_peak_bytes"),
            persistent_bytes=fields.integer_or_none("persistent_bytes"),
            peak_bytes=fields.integer("peak_bytes"),
            wall_seconds=fields.number("wall_seconds"),
            captured=fields.text("captured"),
            notes=fields.texts("notes"),
            tiers=fields.texts("tiers"),
            checks=fields.integer("checks"),
            eager_steps=fields.integer("eager_steps"),
            recaptures=fields.integer("recaptures"),
            capture_seconds=fields.number("capture_seconds"),
            capture_shared_with=fields.text_or_none("capture_shared_with"),
            seed=fields.integer_or_none("seed"),
            resumed_steps=fields.integer("resumed_steps"),
            spills=spills_from(fields),
            memory_speeds=speeds_from(fields),
            evaluations=[
                Evaluation.from_fields(Fields(found, f"evaluations[{number}]."))
                for number, found in enumerate(fields.items("evaluations"))
            ],
            slowdown=_slowdown_from(fields),
        )


def _slowdown_from(fields: Fields) -> Slowdown | None:
    """None, too, in a report of before it was measured."""
    inner = fields.inner_or_none("slowdown") if fields.has("slowdown") else None
    return None if inner is None else Slowdown.from_fields(inner)
