"""A LightningModule as a job, its loop being that of Lightning's automatic optimization."""

from __future__ import annotations

import contextlib
import dis
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from waterflow.common.errors import JobError
from waterflow.job.job import Job

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, LightningModule, Trainer

#: What a module may have of its own: called as Lightning would, or by nobody while it trains.
_TAKEN_OVER = frozenset(
    {
        *("training_step", "configure_optimizers", "forward", "train_dataloader"),
        *("val_dataloader", "test_dataloader", "predict_dataloader", "test_step", "predict_step"),
        *("validation_step", "on_validation_epoch_start", "on_validation_epoch_end"),
        *("on_validation_start", "on_validation_end", "prepare_data", "setup", "teardown"),
        *("on_fit_start", "on_train_start", "configure_model", "transfer_batch_to_device"),
        *("on_test_start", "on_test_end", "on_test_epoch_start", "on_test_epoch_end"),
        *("on_predict_start", "on_predict_end", "on_predict_epoch_start", "on_predict_epoch_end"),
        *("on_test_batch_start", "on_test_batch_end", "on_predict_batch_start"),
        *("on_predict_batch_end", "on_test_model_eval", "on_test_model_train"),
        *("on_predict_model_eval", "on_predict_model_train", "configure_callbacks"),
        *("train", "eval", "extra_repr", "example_input_array"),
    }
)
#: Callbacks of a Trainer that change no number.
_CALLBACKS = (
    "DeviceStatsMonitor",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "ModelSummary",
    "ProgressBar",
    "RichModelSummary",
    "RichProgressBar",
    "TQDMProgressBar",
    "Timer",
)
#: The type in which `training_step` runs where it can.
_PRECISIONS: Mapping[str, torch.dtype | None] = {"32-true": None, "bf16-mixed": torch.bfloat16}
#: What a Trainer is by default, where the job does nothing else.
_DEFAULTS: Mapping[str, Any] = {
    "check_val_every_n_epoch": 1,
    "limit_train_batches": 1.0,
    "limit_val_batches": 1.0,
    "max_time": None,
    "min_epochs": None,
    "min_steps": None,
    "num_devices": 1,
    "num_nodes": 1,
    "overfit_batches": 0.0,
    "reload_dataloaders_every_n_epochs": 0,
    "val_check_interval": 1.0,
    "world_size": 1,
}


def from_lightning(
    module: LightningModule,
    data: LightningDataModule | Iterable[Any] | None = None,
    trainer: Trainer | None = None,
    *,
    name: str | None = None,
    **options: Any,
) -> Job:
    """The training that ``Trainer(...).fit(module, data)`` would do, as a job.

    Its losses and weights are, bit for bit, those of ``torch.manual_seed(seed)`` followed by
    ``fit``: ``training_step`` and ``configure_optimizers`` of the module, its loader, the
    scheduler by its interval. What ``training_step`` logs are the metrics of the job's report; the
    module is validated after each epoch, and what ``validation_step`` logs, averaged, are the
    evaluations.

    Args:
        module: its optimization is automatic, with one optimizer.
        data: a datamodule, a loader of training batches, or None for the module's own.
        trainer: how long (``max_epochs``, ``max_steps``), ``gradient_clip_val``,
            ``accumulate_grad_batches`` and ``precision``; nothing else may differ from a plain
            Trainer on one device. None: say ``epochs`` or ``steps``.
        name: the job's name; None: the module's class.
        options: further arguments of `Job`, such as ``seed`` or ``priority``.

    Raises:
        JobError: something that the job would not do as Lightning does; names it, and the remedy.
        ImportError: lightning is not there; ``pip install 'waterflow[lightning]'``.
    """
    name = name or type(module).__name__
    require = _Refusal(name)
    _check_module(module, require)
    if trainer is not None:
        options = {**_limits(trainer, require), **options}
    train, validation = _loaders(module, data, require)
    numbered, accumulated = _reads_number(module), options.get("accumulate", 1)
    counted = numbered or validation is not None or _asks_where_it_is(module)
    state = _State(name, options.get("epochs"), options.get("steps"), train, counted)
    module.trainer = state  # type: ignore[assignment]
    module.on_fit_start()
    optimizer, scheduler, interval = _optimizers(module, require)
    if trainer is not None:
        options.setdefault("clip_grad_norm", _clipping(trainer, module, optimizer, require))
    module.on_train_start()
    if validation is not None:
        options.setdefault("evaluate", _Validation(name, validation, state))
    return Job(
        name,
        model=module,
        optimizer=optimizer,
        loss=_loss_of(module, numbered),
        data=_Counted(state, train, validation, numbered, accumulated) if counted else train,
        scheduler=scheduler,
        scheduler_every=interval,
        **options,
    )


class _Refusal:
    """Raises JobError where a condition does not hold."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, condition: object, what: str, remedy: str) -> None:
        if not condition:
            raise JobError(f"job {self._name!r}: from_lightning cannot take over {what}: {remedy}")


def _check_module(module: LightningModule, require: _Refusal) -> None:
    from lightning.pytorch import LightningModule

    if not isinstance(module, LightningModule):
        raise JobError(f"from_lightning takes a LightningModule, got {module!r}")
    kind = type(module).__name__
    require(
        module.automatic_optimization,
        f"{kind}'s manual optimization",
        "write the step as a function and give it to Job(step=...)",
    )
    for method in dir(LightningModule):
        if method.startswith("_") or method in _TAKEN_OVER:
            continue
        inherited = inspect.getattr_static(LightningModule, method)
        if not callable(getattr(LightningModule, method)):
            continue
        own = inspect.getattr_static(module, method) is not inherited
        require(not own, f"{kind}.{method}", "do it in training_step, or in the job's on_step")


def _limits(trainer: Trainer, require: _Refusal) -> dict[str, Any]:
    """How long a Trainer trains, as arguments of a job; refuses one that does more than that."""
    for attribute, default in _DEFAULTS.items():
        value = getattr(trainer, attribute, default)
        require(value == default, f"Trainer({attribute}={value!r})", f"leave it at {default!r}")
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        kind = type(callback).__name__
        own = not type(callback).__module__.startswith(("lightning.", "pytorch_lightning."))
        require(
            kind in _CALLBACKS and not own,
            f"the callback {kind}",
            "leave it out and use the job's on_step or evaluate",
        )
    precision = trainer.precision
    require(
        precision in _PRECISIONS,
        f"Trainer(precision={precision!r})",
        f"take one of {', '.join(_PRECISIONS)}",
    )
    limits: dict[str, Any] = {}
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        limits["epochs"] = trainer.max_epochs
    if trainer.max_steps is not None and trainer.max_steps >= 0:
        limits["steps"] = trainer.max_steps
    require(limits, "a Trainer without an end", "say max_epochs or max_steps")
    limits["accumulate"] = trainer.accumulate_grad_batches
    limits["autocast"] = _PRECISIONS[precision]
    return limits


def _clipping(
    trainer: Trainer, module: nn.Module, optimizer: torch.optim.Optimizer, require: _Refusal
) -> float | None:
    """The norm to which gradients are clipped; Lightning does it in the optimizer's order."""
    norm = trainer.gradient_clip_val
    if not norm:
        return None
    by_value = str(getattr(trainer.gradient_clip_algorithm, "value", "")) == "value"
    require(not by_value, 'gradient_clip_algorithm="value"', "clip by the norm")
    listed = [id(p) for group in optimizer.param_groups for p in group["params"]]
    require(
        listed == [id(p) for p in module.parameters() if id(p) in set(listed)],
        "clipping of parameters that the optimizer has in another order than the module",
        "list the optimizer's parameters in the order of module.parameters()",
    )
    return float(norm)


def _loaders(module: LightningModule, data: Any, require: _Refusal) -> tuple[Any, Any]:
    """The loaders of training and of validation; None where nothing is validated."""
    from lightning.pytorch import LightningDataModule, LightningModule

    if isinstance(data, LightningDataModule):
        data.prepare_data()
        data.setup("fit")
    module.prepare_data()
    module.setup("fit")
    module.configure_model()
    source = module if data is None else data
    if not isinstance(source, (LightningDataModule, LightningModule)):
        return data, None
    validation = None
    if _has_own(module, "validation_step") and _has_own(source, "val_dataloader"):
        validation = source.val_dataloader()
        one = isinstance(validation, torch.utils.data.DataLoader)
        require(one, f"val_dataloader() -> {validation!r}", "return one DataLoader")
        shuffled = isinstance(validation.sampler, torch.utils.data.RandomSampler)
        require(not shuffled, "a shuffled val_dataloader", "do not shuffle it")
    return source.train_dataloader(), validation


def _has_own(of: Any, method: str) -> bool:
    return not _is_librarys_function(inspect.getattr_static(type(of), method, None))


def _is_librarys_function(function: Any) -> bool:
    return function is None or str(getattr(function, "__module__", "")).startswith("lightning.")


def _optimizers(
    module: LightningModule, require: _Refusal
) -> tuple[torch.optim.Optimizer, Any, str]:
    """The one optimizer, its scheduler or None, and how often that is stepped."""
    found: Any = module.configure_optimizers()
    schedulers: Sequence[Any] = ()
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], (list, tuple)):
        found, schedulers = found
    if isinstance(found, (list, tuple)):
        require(
            len(found) == 1,
            f"{len(found)} optimizers",
            "write the step as a function and give it to Job(step=...)",
        )
        found = found[0]
    if isinstance(found, Mapping):
        if "lr_scheduler" in found:
            schedulers = [found["lr_scheduler"]]
        found = found.get("optimizer")
    require(
        isinstance(found, torch.optim.Optimizer),
        f"configure_optimizers() -> {found!r}",
        "return an optimizer of torch.optim",
    )
    require(len(schedulers) <= 1, f"{len(schedulers)} schedulers", "chain them to one")
    if not schedulers:
        return found, None, "epoch"
    scheduler = schedulers[0]
    settings: Mapping[str, Any] = {}
    if isinstance(scheduler, Mapping):
        settings, scheduler = scheduler, scheduler["scheduler"]
    frequency, interval = settings.get("frequency", 1), settings.get("interval", "epoch")
    require(frequency == 1, f"a scheduler's frequency={frequency}", "let it be 1")
    require(
        not isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau),
        "ReduceLROnPlateau",
        "it follows a logged metric: take a schedule of steps or epochs",
    )
    return found, scheduler, interval


class _State:
    """What a module finds as its trainer while it is a job's model: where its training is.

    Whatever else it asks a trainer for is an error: an answer made up would be another number.
    """

    current_epoch: int  # the next two where batches are counted alone: else asking is an error
    global_step: int

    def __init__(
        self, name: str, epochs: int | None, steps: int | None, loader: Any, counts: bool
    ) -> None:
        self._name = name
        self._loader = loader
        self.max_epochs = epochs
        self.max_steps = -1 if steps is None else steps
        if counts:
            self.current_epoch = self.global_step = 0
        self.world_size = 1
        self.global_rank = self.local_rank = self.node_rank = 0
        self.is_global_zero = True
        self.training = True
        self.sanity_checking = self.validating = self.testing = self.predicting = False
        self.fast_dev_run = False
        self.loggers: list[Any] = []
        self.logger = None

    @property
    def num_training_batches(self) -> int:
        """Batches of an epoch."""
        return len(self._loader)

    @property
    def estimated_stepping_batches(self) -> int:
        """Updates of the whole training."""
        total = None if self.max_epochs is None else self.max_epochs * self.num_training_batches
        if self.max_steps >= 0:
            return self.max_steps if total is None else min(total, self.max_steps)
        if total is None:
            raise JobError(f"job {self._name!r}: its length is not known: say epochs or steps")
        return total

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise JobError(
            f"job {self._name!r}: its module asks its trainer for {attribute!r}, which a job has "
            "not: leave that out, or train it with Lightning"
        )


def _asks_where_it_is(module: nn.Module) -> bool:
    """Whether the module's own code may ask where its training is."""
    names = {"trainer", "_trainer", "current_epoch", "global_step"}
    own = (kind for kind in type(module).__mro__ if not _is_librarys(kind))
    functions = (value for kind in own for value in vars(kind).values())
    return any(names & _names_of(function) for function in functions)


def _is_librarys(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("builtins", "lightning", "torch", "abc")


def _names_of(function: Any) -> set[str]:
    """The names and texts in a function's code and the functions within."""
    function = inspect.unwrap(getattr(function, "__func__", getattr(function, "fget", function)))
    found: set[str] = set()
    codes = [code] if (code := getattr(function, "__code__", None)) is not None else []
    while codes:
        code = codes.pop()
        found.update(code.co_names)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                codes.append(constant)
            elif isinstance(constant, str):
                found.add(constant)
    return found


class _Counted:
    """A loader whose reader's module can ask for the epoch and the step."""

    def __init__(
        self, state: _State, loader: Any, validation: Any, numbered: bool, accumulated: int
    ) -> None:
        self._state = state
        self._loader = loader
        self._validation = validation
        self._numbered = numbered
        self._accumulated = accumulated
        self._epochs = self._steps = 0

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        if self._epochs and self._validation is not None:
            # The validation after the epoch before has drawn a seed for its loader, in the
            # training's random stream; an evaluation of a job draws in streams of its own.
            iter(self._validation)
        self._state.current_epoch = self._epochs
        self._epochs += 1
        batches = 0
        for batch in self._loader:
            self._state.global_step = self._steps + batches // self._accumulated
            yield (batch, batches) if self._numbered else batch
            batches += 1
        self._steps += -(-batches // self._accumulated)


class _Validation:
    """Validates a module as Lightning's loop does, and says what it has logged."""

    def __init__(self, name: str, loader: Iterable[Any], state: _State) -> None:
        self._name = name
        self._loader = loader
        self._state = state

    def __call__(self, module: Any) -> dict[str, float] | None:
        parameters = list(inspect.signature(module.validation_step).parameters)
        means: dict[str, _Mean] = {}
        self._state.training, self._state.validating = False, True
        try:
            module.on_validation_start()
            module.on_validation_epoch_start()
            batches = iter(self._loader)
            before = torch.get_rng_state()
            for index, batch in enumerate(batches):
                batch = module.transfer_batch_to_device(batch, module.device, 0)
                with _logging(module) as logged:
                    module.validation_step(*(batch, index, 0)[: len(parameters)])
                size = _batch_size(batch)
                for key, value in logged.items():
                    means.setdefault(key, _Mean()).add(value, size)
            if not torch.equal(before, torch.get_rng_state()):
                raise JobError(
                    f"job {self._name!r}: its validation_step draws random numbers, which with "
                    "Lightning would change the training's: draw from a torch.Generator of its own"
                )
            with _logging(module) as logged:
                module.on_validation_epoch_end()
            module.on_validation_end()
        finally:
            self._state.training, self._state.validating = True, False
        values = {key: mean.value for key, mean in means.items()}
        values.update({key: _number(value) for key, value in logged.items()})
        return values or None


class _Mean:
    """Over batches, by their sizes; of a metric of torchmetrics, what that computes."""

    def __init__(self) -> None:
        self._sum = torch.zeros(())
        self._count = 0
        self._metric: Any = None

    def add(self, value: Any, size: int) -> None:
        """Takes in the value of one batch."""
        if _is_metric(value):
            self._metric = value
            return
        self._sum = self._sum + torch.as_tensor(value).detach().cpu() * size
        self._count += size

    @property
    def value(self) -> float:
        """Of all batches; a metric begins anew."""
        return _number(self._sum / self._count if self._metric is None else self._metric)


def _is_metric(value: Any) -> bool:
    return hasattr(value, "compute") and hasattr(value, "reset")


def _number(value: Any) -> float:
    if _is_metric(value):
        computed = float(value.compute())
        value.reset()
        return computed
    return float(value)


def _batch_size(batch: Any) -> int:
    """As Lightning finds it: the first dimension of the first tensor."""
    from lightning.pytorch.utilities.data import extract_batch_size

    return int(extract_batch_size(batch))


def _loss_of(
    module: LightningModule, numbered: bool
) -> Callable[[nn.Module, Any], tuple[torch.Tensor, dict[str, Any]]]:
    """`training_step`, and what it logs as metrics.

    Args:
        module: whose.
        numbered: whether batches come with their numbers in the epoch.
    """
    count = len(inspect.signature(module.training_step).parameters)

    def loss(model: Any, batch: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        batch, number = batch if numbered else (batch, 0)
        with _logging(model) as logged:
            found = model.training_step(*(batch, number, 0)[:count])
        value: torch.Tensor = found["loss"] if isinstance(found, Mapping) else found
        if value is None:
            raise JobError("training_step returned None: a job skips no step; return a loss")
        return value, logged

    return loss


def _reads_number(module: LightningModule) -> bool:
    """Whether `training_step` may read its batch's number: a value that changes at every step."""
    parameters = list(inspect.signature(module.training_step).parameters)
    return any(_reads(module.training_step, parameter) for parameter in parameters[1:2])


def _reads(function: Callable[..., Any], variable: str) -> bool:
    """Whether a function may read one of its variables."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is None or {"locals", "vars", "eval", "exec", "_getframe"} & set(code.co_names):
        return True
    instructions = dis.get_instructions(code)
    return variable in code.co_cellvars or any(
        variable == read or (isinstance(read, tuple) and variable in read)
        for read in (instruction.argval for instruction in instructions)
    )


@contextlib.contextmanager
def _logging(module: LightningModule) -> Iterator[dict[str, Any]]:
    """What the module logs meanwhile."""
    logged: dict[str, Any] = {}

    def log(name: str, value: Any, *_: Any, **__: Any) -> None:
        logged[name] = value.detach() if isinstance(value, torch.Tensor) else value

    own = vars(module)
    own["log"] = log
    try:
        yield logged
    finally:
        del own["log"]
