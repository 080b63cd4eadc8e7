"""What the user describes: a job, its callback's argument, and the word that stops it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import nn

from waterflow.common.errors import JobError
from waterflow.common.units import parse_bytes
from waterflow.job.optimizer_state import trained_parameters


class _Stop:
    def __repr__(self) -> str:
        return "waterflow.STOP"


#: Returned by a job's ``on_step`` callback to end that job after the present step.
STOP: Final = _Stop()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a job's ``on_step`` callback learns of the step that has just ended.

    Attributes:
        job: the job's name.
        step: steps done so far, this one included (1, 2, ...).
        epoch: the epoch that the step belongs to (0, 1, ...).
        loss: the step's loss.
        learning_rates: one per parameter group, as they were during the step.
    """

    job: str
    step: int
    epoch: int
    loss: float
    learning_rates: tuple[float, ...]


class Scheduler(Protocol):
    """A learning-rate scheduler of ``torch.optim.lr_scheduler``, or anything with its ``step``."""

    def step(self) -> Any:
        """Sets the learning rates for the next step."""


#: Set while a job is made to be looked at and not to be run: its model may be on "meta" then, where
#: tensors have shapes and no memory. Such a model counts as one on the host.
META_ALLOWED: ContextVar[bool] = ContextVar("META_ALLOWED", default=False)

LossFunction = Callable[[nn.Module, Any], torch.Tensor]
StepCallback = Callable[[StepResult], Any]


#: How often captured steps are compared with eager ones; see `Job.audit`.
AUDITS = ("log", "all", "off")


def check_audit(audit: object, whose: str = "", optional: bool = False) -> None:
    """Raises JobError where `audit` is none of `AUDITS`, nor None where that is allowed."""
    if not (audit in AUDITS or (audit is None and optional)):
        raise JobError(f"{whose}audit must be one of {', '.join(AUDITS)}, got {audit!r}")


#: See `Job.priority`; the first goes first.
PRIORITIES = ("guaranteed", "normal", "opportunistic")


def check_priority(priority: object, whose: str = "") -> None:
    """Raises JobError where `priority` is none of `PRIORITIES`."""
    if priority not in PRIORITIES:
        known = ", ".join(map(repr, PRIORITIES))
        raise JobError(f"{whose}priority must be one of {known}, got {priority!r}")


def check_weight(weight: object, whose: str = "") -> None:
    """Raises JobError where `weight` is no number above 0."""
    if type(weight) not in (int, float) or not 0 < weight < float("inf"):  # type: ignore[operator]
        raise JobError(f"{whose}weight must be a number above 0, got {weight!r}")


@dataclass(slots=True, eq=False)
class Job:
    """A model, optimizer, loss and data that train together.

    The job's numbers are those of this loop, run alone::

        torch.manual_seed(seed)
        for _ in range(epochs):
            for batch in data:
                optimizer.zero_grad()
                loss(model, batch).backward()
                optimizer.step()
                scheduler.step()
                on_step(...)

    An optimizer whose ``step`` demands a closure (LBFGS) gets one that does the first two lines; a
    ``ReduceLROnPlateau`` is given the step's loss. `docs/equality.md` tells the whole of it.

    Args:
        name: unique within a run.
        model: any module, on the device of the run; trained in place.
        optimizer: any ``torch.optim`` optimizer over its parameters.
        loss: ``(model, batch) -> scalar tensor``.
        data: iterable of batches: tensors, tuples, lists, dicts, data classes, nested. It is
            iterated once per epoch. Batches are made on the host: in a run on a GPU their tensors
            are copied there ahead of need, and ``loss`` is given the copies.
        epochs: passes over ``data``; one if neither ``epochs`` nor ``steps`` is given.
        steps: training steps; epochs follow each other until they are done. With ``epochs`` too,
            whichever ends first.
        scheduler: stepped after every step, or after every epoch.
        scheduler_every: ``"step"`` or ``"epoch"``.
        seed: the job's own random stream. None: drawn from torch's default generator when the job
            is submitted.
        on_step: called after every step; returns None or ``STOP``.
        capture: "auto" captures the step as one graph where that is proved to give the loop's
            numbers, and runs it as the user's own eager Python where not; the report says why.
            True insists: a step that cannot be captured fails the job with CaptureError. False
            runs it eagerly from the start. Same numbers, but eager steps have no memory flow.
        audit: how often a captured step is compared with the eager step, by bits: "log" at the
            first use of each graph and at steps 1, 2, 4, 8, ...; "all" at every step; "off" never.
            None: as the run says.
        keep_grads: leaves ``p.grad`` to callbacks as the loop does, until the next step begins.
            The step then runs eagerly. Found by itself where `on_step` names ``grad`` or steps
            another optimizer.
        clip_grad_norm: where given, ``torch.nn.utils.clip_grad_norm_`` with this norm between
            ``backward`` and ``optimizer.step``.
        stop_on_nan: end the job as failed when its loss is NaN or infinite.
        weight: share of the lanes' time, beside other jobs' weights, under the policy "flow" when
            there are more jobs than lanes.
        priority: "guaranteed" runs as if it were alone: it goes first, and others beside it are
            held back as far as they would slow it down. "opportunistic" lives from what all others
            leave. "normal": a fair share among its equals. Under the policy "flow".
        memory_limit: bytes that the job may need at most, or a text such as "2GiB": its captured
            step is planned into that, by the order of its updates and, where that does not suffice,
            by spilling. None: whatever it needs.

    Raises:
        JobError: an argument is of the wrong kind; the message names the job and the value.
    """

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: LossFunction
    data: Iterable[Any]
    epochs: int | None = None
    steps: int | None = None
    scheduler: Scheduler | None = None
    scheduler_every: str = "step"
    seed: int | None = None
    on_step: StepCallback | None = None
    capture: bool | str = "auto"
    clip_grad_norm: float | None = None
    stop_on_nan: bool = False
    weight: float = 1.0
    priority: str = "normal"
    audit: str | None = None
    keep_grads: bool = False
    memory_limit: int | str | None = None

    def __post_init__(self) -> None:
        self._check()

    def change(self, **fields: Any) -> None:
        """Gives fields other values, before the job is submitted.

        Raises:
            JobError: one of them cannot be; the job is as it was.
        """
        former = {field: getattr(self, field) for field in fields}
        try:
            self._assign(fields)
            self._check()
        except JobError:
            self._assign(former)
            raise

    def _assign(self, fields: Mapping[str, Any]) -> None:
        for field, value in fields.items():
            setattr(self, field, value)

    def _check(self) -> None:
        self._check_kinds()
        self._check_counts()
        self._check_parameters()

    def _require(self, condition: object, problem: str) -> None:
        if not condition:
            raise JobError(f"job {self.name!r}: {problem}")

    def _check_kinds(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise JobError(f"a job's name must be a non-empty string, got {self.name!r}")
        kinds = {"model": nn.Module, "optimizer": torch.optim.Optimizer}
        for field, kind in kinds.items():
            value = getattr(self, field)
            wanted = f"{kind.__module__}.{kind.__name__}"
            self._require(isinstance(value, kind), f"{field} must be a {wanted}, got {value!r}")
        self._require(callable(self.loss), f"loss must be callable, got {self.loss!r}")
        self._require(
            hasattr(self.data, "__iter__") or hasattr(self.data, "__getitem__"),
            f"data must be iterable, got {type(self.data).__name__}",
        )
        self._require(
            self.capture in (True, False, "auto") and type(self.capture) in (bool, str),
            f"capture must be 'auto', True or False, got {self.capture!r}",
        )
        check_audit(self.audit, f"job {self.name!r}: ", optional=True)
        self._require(
            self.on_step is None or callable(self.on_step),
            f"on_step must be callable or None, got {self.on_step!r}",
        )
        self._require(
            self.scheduler is None or hasattr(self.scheduler, "step"),
            f"scheduler must have a step method, got {self.scheduler!r}",
        )

    def _check_counts(self) -> None:
        for field in ("epochs", "steps"):
            value = getattr(self, field)
            good = value is None or (type(value) is int and value >= 1)
            self._require(good, f"{field} must be a positive whole number, got {value!r}")
        self._require(
            self.scheduler_every in ("step", "epoch"),
            f"scheduler_every must be 'step' or 'epoch', got {self.scheduler_every!r}",
        )
        good_seed = self.seed is None or (type(self.seed) is int and -(2**63) <= self.seed < 2**64)
        self._require(good_seed, f"seed must be a whole number or None, got {self.seed!r}")
        self._require(
            self.clip_grad_norm is None or self.clip_grad_norm > 0,
            f"clip_grad_norm must be above 0 or None, got {self.clip_grad_norm!r}",
        )
        check_weight(self.weight, f"job {self.name!r}: ")
        check_priority(self.priority, f"job {self.name!r}: ")
        if self.memory_limit is not None:
            try:
                self.memory_limit = parse_bytes(self.memory_limit)
            except JobError as error:
                raise JobError(f"job {self.name!r}: memory_limit: {error}") from None
            self._require(
                self.capture is not False,
                f"memory_limit={self.memory_limit} needs a captured step, as eager Python cannot "
                "be spilled: leave out capture=False, or the limit",
            )
        if self.epochs is None and self.steps is None:
            self.epochs = 1

    @property
    def limit_bytes(self) -> int | None:
        """`memory_limit` in bytes."""
        return None if self.memory_limit is None else parse_bytes(self.memory_limit)

    def _check_parameters(self) -> None:
        devices = {str(t.device) for t in (*self.model.parameters(), *self.model.buffers())}
        self._require(
            len(devices) <= 1,
            f"its model is spread over the devices {', '.join(sorted(devices))}; a job trains on "
            "one: move the whole model with model.to(device) and make the optimizer afterwards",
        )
        known = {"cpu", "cuda", *(["meta"] if META_ALLOWED.get() else [])}
        self._require(
            all(device.split(":")[0] in known for device in devices),
            f"its model is on {', '.join(devices)}; jobs train on 'cpu' or 'cuda': move the model "
            "there with model.to(device) and make the optimizer from its parameters",
        )
        trained = {id(p) for p in trained_parameters(self.optimizer)}
        own = {id(parameter) for parameter in self.model.parameters()}
        self._require(trained, "its optimizer has no parameters")
        self._require(
            trained & own or not own,
            "its optimizer holds none of its model's parameters: make the optimizer from this "
            "model's parameters()",
        )

    @property
    def device(self) -> torch.device:
        """Where the model is; the host for a model without tensors."""
        first = next(iter((*self.model.parameters(), *self.model.buffers())), None)
        if first is None or first.device.type == "meta":
            return torch.device("cpu")
        return first.device

    @property
    def total_steps(self) -> int | None:
        """Steps that the job will make if nothing stops it; None where the data has no length."""
        if self.epochs is None:
            return self.steps
        try:
            counted = self.epochs * len(self.data)  # type: ignore[arg-type]
        except TypeError:
            return self.steps
        return counted if self.steps is None else min(counted, self.steps)
