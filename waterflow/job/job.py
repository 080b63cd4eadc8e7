"""What the user describes: a job, its callback's argument, and the word that stops it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from torch import nn

from waterflow.common.errors import JobError
from waterflow.common.units import parse_bytes
from waterflow.job.batch_reads import BatchReads, reads_of
from waterflow.job.epochs import steps_in
from waterflow.job.optimizer_state import trained_parameters
from waterflow.job.outcome import Scalar
from waterflow.job.rules import StepRules
from waterflow.job.several import Modules, OptimizerSet, SchedulerSet, module_of, schedulers_in
from waterflow.partitioner.policies.coordinator import TOLERANCE


class _Stop:
    def __repr__(self) -> str:
        return "waterflow.STOP"


#: Returned by a job's ``on_step`` or ``evaluate`` to end that job after the present step.
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
        metrics: what the step has told beside its loss, by name.
        model: the job's model, after the step.
        epoch_ended: whether the step is the last of its epoch; None where the data have no length,
            so that nobody knows before the next batch is asked for.
        evaluation: what ``evaluate`` returned after this step, by name ("value" where it was a
            number); None where it was not due.
    """

    job: str
    step: int
    epoch: int
    loss: float
    learning_rates: tuple[float, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    model: nn.Module | None = field(default=None, repr=False, compare=False)
    epoch_ended: bool | None = None
    evaluation: Mapping[str, float] | None = None


class Scheduler(Protocol):
    """A learning-rate scheduler of ``torch.optim.lr_scheduler``, or anything with its ``step``."""

    def step(self) -> Any:
        """Sets the learning rates for the next step."""


#: Set while a job is made to be looked at and not to be run: its model may be on "meta" then, where
#: tensors have shapes and no memory. Such a model counts as one on the host.
META_ALLOWED: ContextVar[bool] = ContextVar("META_ALLOWED", default=False)

LossFunction = Callable[[nn.Module, Any], torch.Tensor | tuple[torch.Tensor, Mapping[str, Scalar]]]
StepFunction = Callable[
    [Any], torch.Tensor | float | tuple[torch.Tensor | float, Mapping[str, Scalar]]
]
StepCallback = Callable[[StepResult], Any]
EvaluateFunction = Callable[[nn.Module], Any]


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


def check_max_slowdown(slowdown: object, whose: str = "") -> None:
    """Raises JobError where `slowdown` is no number above 0; infinity is one."""
    if type(slowdown) not in (int, float) or not slowdown > 0:  # type: ignore[operator]
        raise JobError(
            f"{whose}max_slowdown must be a number above 0 (0.01 is 1 %), got {slowdown!r}"
        )


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
                if due: evaluate(model)
                on_step(...)

    An optimizer whose ``step`` demands a closure (LBFGS) gets one that does the first two lines; a
    ``ReduceLROnPlateau`` is given the step's loss. `docs/equality.md` tells the whole of it.

    Args:
        name: unique within a run.
        model: any module, on the device of the run; trained in place. A dict or a list of modules
            becomes an ``nn.ModuleDict`` or an ``nn.ModuleList``.
        optimizer: any ``torch.optim`` optimizer over its parameters.
        loss: ``(model, batch) -> scalar tensor``, or that and a dict of metrics: numbers or tensors
            with one element, which the report keeps for each step.
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
        clip_grad_value: the same with ``torch.nn.utils.clip_grad_value_``, after it.
        autocast: where given (``torch.bfloat16``), the type that the forward pass and the loss run
            in, under ``torch.autocast`` of the device.
        accumulate: how many batches make a step. Each loss is divided by that number before its
            ``backward``, and the optimizer steps once; the step's loss is the sum of these, a
            metric the mean of its batches'. The last step of an epoch has what batches are left,
            divided by the same number. A step's batches are fetched before it begins.
        step: in place of ``loss``, the whole step as the user's own function of the batch: it
            calls ``zero_grad``, ``backward`` and ``step`` of whatever it likes, and returns the
            loss (a tensor with one element, or a number) that is to be reported, or that and a
            dict of metrics. It is captured as a whole where that is exact: not where it reads a
            number from a tensor (``.item()``), or returns one.
        optimizers: in place of ``optimizer``, those that ``step`` steps.
        modules: further modules that are trained, or only belong to the job (a loss with parameters
            of its own, averaged weights): one, a list, or a dict. They count and are kept in
            checkpoints as the model is.
        schedulers: in place of ``scheduler``, several, stepped one after another.
        scheduler_metric: what a ``ReduceLROnPlateau`` is told: "loss", or the name of a metric.
        stop_on_nan: end the job as failed when its loss is NaN or infinite.
        weight: share of the lanes' time, beside other jobs' weights, under the policy "flow" when
            there are more jobs than lanes.
        priority: "guaranteed" runs as if it were alone: it goes first, and others beside it are
            held back as far as they would slow it down. "opportunistic" lives from what all others
            leave. "normal": a fair share among its equals. Under the policy "flow".
        max_slowdown: of a guaranteed job, how much slower than alone it may be for the sake of
            those beside it: 0.01 is 1 %; ``math.inf`` lets them run as they can, behind it.
        memory_limit: bytes that the job may need at most, or a text such as "2GiB": its captured
            step is planned into that, by the order of its updates and, where that does not suffice,
            by spilling; one that runs as eager Python is out of memory where it asks for more.
            None: whatever it needs.
        evaluate: ``(model) -> number | dict of numbers | STOP | None``, or a pair of numbers and
            ``STOP``: called between two steps with the model in eval mode, under ``no_grad``. It
            changes nothing of the training: the modes of all submodules, the gradients and the
            random streams are put back. What it holds counts in the budget. Its numbers are in
            ``JobReport.evaluations`` and ``StepResult.evaluation``; ``STOP`` ends the job.
        evaluate_every: "epoch", after the last step of each epoch, or a number of steps.

    Raises:
        JobError: an argument is of the wrong kind; the message names the job and the value.
    """

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer = None  # type: ignore[assignment]  # one of `optimizers`
    loss: LossFunction = None  # type: ignore[assignment]  # only beside `step`
    data: Iterable[Any] = None  # type: ignore[assignment]  # refused
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
    clip_grad_value: float | None = None
    autocast: torch.dtype | None = None
    accumulate: int = 1
    step: StepFunction | None = None
    optimizers: Sequence[torch.optim.Optimizer] | None = None
    modules: Modules | None = None
    schedulers: Sequence[Scheduler] | None = None
    scheduler_metric: str = "loss"
    evaluate: EvaluateFunction | None = None
    evaluate_every: int | str = "epoch"
    max_slowdown: float = TOLERANCE
    _root: nn.Module = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._put_together()
        self._check_kinds()
        self._check_counts()
        self._check_parameters()

    def _require(self, condition: object, problem: str) -> None:
        if not condition:
            raise JobError(f"job {self.name!r}: {problem}")

    def _put_together(self) -> None:
        """Of several optimizers, schedulers and modules each becomes one."""
        if not isinstance(self.name, str) or not self.name:
            raise JobError(f"a job's name must be a non-empty string, got {self.name!r}")
        self._take_step()
        if self.optimizers is not None:
            kind = torch.optim.Optimizer
            members = self._members("optimizer", self.optimizers, lambda o: isinstance(o, kind))
            self.optimizer = members[0] if len(members) == 1 else OptimizerSet(members)
        if self.schedulers is not None:
            members = self._members("scheduler", self.schedulers, lambda s: hasattr(s, "step"))
            self.scheduler = members[0] if len(members) == 1 else SchedulerSet(members)
        try:
            self.model = module_of(self.model)
            self._root = self.model
            if self.modules is not None:
                beside = module_of(self.modules)
                self._root = nn.ModuleDict({"model": self.model, "beside": beside})
        except (KeyError, TypeError) as error:
            raise JobError(
                f"job {self.name!r}: model and modules must be modules, or lists or dicts of "
                f"modules: {error}"
            ) from None

    def _members(self, what: str, given: Any, fits: Callable[[Any], bool]) -> list[Any]:
        """The several that are given in place of one."""
        self._require(
            getattr(self, what) is None, f"give {what} or {what}s, not both: put it into {what}s"
        )
        good = isinstance(given, (list, tuple)) and given and all(map(fits, given))
        self._require(good, f"{what}s must be a list of {what}s, got {given!r}")
        return list(given)

    def _take_step(self) -> None:
        """A step of the user's own goes its own way: what else describes one is refused."""
        if self.step is None:
            self._require(
                self.optimizers is None or len(self.optimizers) == 1,
                "several optimizers are stepped by a step of one's own: give step= in place of "
                "loss=",
            )
            return
        self._require(callable(self.step), f"step must be callable, got {self.step!r}")
        self._require(self.loss is None, "give loss or step, not both")
        self._require(
            self.rules == StepRules(),
            "clip_grad_norm, clip_grad_value, autocast and accumulate are for jobs with loss=: a "
            "step of one's own does that itself",
        )

    def _check_kinds(self) -> None:
        kinds = {"model": nn.Module, "optimizer": torch.optim.Optimizer}
        for name, kind in kinds.items():
            value = getattr(self, name)
            wanted = f"{kind.__module__}.{kind.__name__}"
            self._require(isinstance(value, kind), f"{name} must be a {wanted}, got {value!r}")
        self._require(
            callable(self.loss) or self.step is not None,
            f"loss must be callable, got {self.loss!r}",
        )
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
            self.evaluate is None or callable(self.evaluate),
            f"evaluate must be callable or None, got {self.evaluate!r}",
        )
        every = self.evaluate_every
        self._require(
            every == "epoch" or (type(every) is int and every >= 1),
            f"evaluate_every must be 'epoch' or a positive whole number of steps, got {every!r}",
        )
        self._require(
            self.on_step is None or callable(self.on_step),
            f"on_step must be callable or None, got {self.on_step!r}",
        )
        self._require(
            isinstance(self.scheduler_metric, str),
            f"scheduler_metric must be a text, got {self.scheduler_metric!r}",
        )
        self._require(
            self.scheduler is None or hasattr(self.scheduler, "step"),
            f"scheduler must have a step method, got {self.scheduler!r}",
        )

    def _check_counts(self) -> None:
        for name in ("epochs", "steps"):
            value = getattr(self, name)
            good = value is None or (type(value) is int and value >= 1)
            self._require(good, f"{name} must be a positive whole number, got {value!r}")
        self._require(
            self.scheduler_every in ("step", "epoch"),
            f"scheduler_every must be 'step' or 'epoch', got {self.scheduler_every!r}",
        )
        good_seed = self.seed is None or (type(self.seed) is int and -(2**63) <= self.seed < 2**64)
        self._require(good_seed, f"seed must be a whole number or None, got {self.seed!r}")
        self.rules.check(self._require)
        check_weight(self.weight, f"job {self.name!r}: ")
        check_priority(self.priority, f"job {self.name!r}: ")
        check_max_slowdown(self.max_slowdown, f"job {self.name!r}: ")
        if self.memory_limit is not None:
            try:
                self.memory_limit = parse_bytes(self.memory_limit)
            except JobError as error:
                raise JobError(f"job {self.name!r}: memory_limit: {error}") from None
        if self.epochs is None and self.steps is None:
            self.epochs = 1

    @property
    def limit_bytes(self) -> int | None:
        """`memory_limit` in bytes."""
        return None if self.memory_limit is None else parse_bytes(self.memory_limit)

    def change(self, **fields: Any) -> None:
        """Gives some of its fields, such as its priority, other values, before it is submitted.

        Raises:
            JobError: one of them cannot be; the job is as it was.
        """
        former = {name: getattr(self, name) for name in fields}
        try:
            self._assign(fields)
            self._check_counts()
        except JobError:
            self._assign(former)
            raise

    def _assign(self, fields: Mapping[str, Any]) -> None:
        for name, value in fields.items():
            setattr(self, name, value)

    def _check_parameters(self) -> None:
        devices = {str(t.device) for t in (*self.root.parameters(), *self.root.buffers())}
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
        own = {id(parameter) for parameter in self.root.parameters()}
        self._require(trained, "its optimizer has no parameters")
        self._require(
            trained & own or not own,
            "its optimizer holds none of its model's parameters: make the optimizer from this "
            "model's parameters()",
        )
        for scheduler in schedulers_in(self.scheduler):
            other = getattr(scheduler, "optimizer", None)
            self._require(
                not isinstance(other, torch.optim.Optimizer)
                or trained & {id(p) for p in trained_parameters(other)},
                f"its {type(scheduler).__name__} schedules another optimizer, which holds none of "
                "the parameters that its own one holds: make the scheduler from this job's "
                "optimizer",
            )

    @property
    def device(self) -> torch.device:
        """Where the model is; the host for a model without tensors."""
        root = self.root
        first = next(itertools.chain(root.parameters(), root.buffers()), None)
        if first is None or first.device.type == "meta":
            return torch.device("cpu")
        return first.device

    @property
    def root(self) -> nn.Module:
        """One module that holds all that belong to the job: the model, and `modules` beside it."""
        if self.modules is not None and self._root["model"] is not self.model:  # type: ignore[index]
            self._root["model"] = self.model  # type: ignore[operator]  # a callback's
        return self.model if self.modules is None else self._root

    def model_in(self, root: nn.Module) -> nn.Module:
        """The model in what stands for `root`."""
        return root if self.modules is None else root["model"]  # type: ignore[index]

    @property
    def function(self) -> Callable[..., Any]:
        """The user's function behind its steps: its loss, or its own step."""
        return self.loss if self.step is None else self.step

    @property
    def batch_reads(self) -> BatchReads | None:
        """What its step can read of a batch; None: all of it."""
        return reads_of(self.function, 1 if self.step is None else 0)

    @property
    def why_eager(self) -> str | None:
        """Why none of its steps is ever captured; None where they may be."""
        return "the job has capture=False" if self.capture is False else None

    @property
    def rules(self) -> StepRules:
        """What its steps do beside calling loss and optimizer, as it is now."""
        fields = self.clip_grad_norm, self.clip_grad_value, self.autocast, self.accumulate
        return StepRules._make(fields)  # whose code is the standard library's, unlike __new__

    @property
    def length(self) -> int | None:
        """Steps of an epoch; None where the data has no length."""
        try:
            return steps_in(len(self.data), self.accumulate)  # type: ignore[arg-type]
        except Exception:  # the plain loop asks for none
            return None

    @property
    def total_steps(self) -> int | None:
        """Steps that the job will make if nothing stops it; None where the data has no length."""
        if self.epochs is None:
            return self.steps
        if self.length is None:
            return self.steps
        counted = self.epochs * self.length
        return counted if self.steps is None else min(counted, self.steps)
