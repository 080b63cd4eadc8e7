"""Cases: the step looks at the world outside, or the caller has put something around the run."""

from __future__ import annotations

import contextlib
import contextvars
import datetime
import io
import itertools
import logging
import os
import secrets
import tempfile
import time
import uuid
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.exactness.case import Net, Subject, batches, case, cross_entropy, job, mlp, sgd

AROUND: contextvars.ContextVar[float] = contextvars.ContextVar("AROUND", default=1.0)


# -- the outside world: each step must see its own, whatever that is


def seeing(name, look):
    """Enters a case whose step looks at something that never repeats itself."""

    def make(live):
        model = mlp()
        loss = lambda m, b: cross_entropy(m, b) * (1 + look() % 1e6)  # noqa: E731
        losses = []
        made = job(
            model,
            loss,
            optimizer=sgd(model, lr=0.0),
            data=batches(1) * 10,
            on_step=lambda result: losses.append(result.loss),
        )
        return Subject(made, lambda: len(set(losses)) > 5)

    make.__name__ = name
    case("opaque", repeats=False, matters=False)(make)


seeing("time_time", lambda: time.time() * 1e4)
seeing("perf_counter", time.perf_counter_ns)
seeing("monotonic", time.monotonic_ns)
seeing("date_and_time", lambda: datetime.datetime.now().microsecond)
seeing("urandom", lambda: int.from_bytes(os.urandom(3), "big"))
seeing("unique_name", lambda: uuid.uuid4().int)
seeing("secret_number", lambda: secrets.randbelow(10**6))


@case("opaque")
def counter_in_the_environment(live):
    os.environ["STEPS_OF_THE_CASE"] = "0"

    def loss(model, batch):
        calls = int(os.environ["STEPS_OF_THE_CASE"]) + 1
        os.environ["STEPS_OF_THE_CASE"] = str(calls)
        return cross_entropy(model, batch) / (calls if live else 1)

    return job(mlp(), loss)


@case("opaque")
def counter_in_a_file(live):
    file = Path(tempfile.mkdtemp()) / "calls"
    file.write_text("0")

    def loss(model, batch):
        calls = int(file.read_text()) + 1
        file.write_text(str(calls))
        return cross_entropy(model, batch) / (calls if live else 1)

    return Subject(job(mlp(), loss), file.read_text)


@case("opaque", matters=False)
def lines_printed(live):
    out = io.StringIO()

    def loss(model, batch):
        print("a step", file=out)
        return cross_entropy(model, batch)

    return Subject(job(mlp(), loss), out.getvalue)


@case("opaque", matters=False)
def lines_logged(live):
    records = []

    class Handler(logging.Handler):
        def emit(self, record):
            records.append(record.getMessage())

    logger = logging.Logger("of the step")
    logger.addHandler(Handler())

    class Model(Net):
        def factor(self, x):
            logger.warning("%d rows", len(x))
            return 1.0

    return Subject(job(Model()), lambda: records)


@case("opaque", "captured", matters=False)
def warnings_raised(live):
    def loss(model, batch):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.warn("once a step", stacklevel=2)
        return cross_entropy(model, batch)

    return job(mlp(), loss)


# -- what is around the run


class Sigmoids(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return (torch.sigmoid if function is torch.tanh else function)(*args, **(kwargs or {}))


class Halves(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        return out * 0.5 if function is torch.ops.aten.tanh.default else out


@contextlib.contextmanager
def context_variable():
    token = AROUND.set(3.0)
    try:
        yield
    finally:
        AROUND.reset(token)


@contextlib.contextmanager
def default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def rounded_tensors():
    """Saved for the backward pass in half of their bits."""
    narrow = lambda t: t.to(torch.bfloat16) if t.is_floating_point() else t  # noqa: E731
    wide = lambda t: t.to(torch.float32) if t.is_floating_point() else t  # noqa: E731
    return torch.autograd.graph.saved_tensors_hooks(narrow, wide)


def around(name, context, undo, *expected, **options):
    """Enters a case of a context around the run; one that is not live undoes it in the loss."""

    class Model(Net):
        def forward(self, x):
            return self.two(torch.tanh(self.one(x)).float()).float()

    def make(live):
        def loss(model, batch):
            with contextlib.nullcontext() if live else undo():
                return cross_entropy(model, batch)

        return job(Model(), loss)

    make.__name__ = name
    case(*(expected or ("captured", "opaque")), around=context, **options)(make)


def _device():
    return torch.device("cpu")


def _no_autocast():
    return torch.autocast("cpu", enabled=False)


around("autocast_around", lambda: torch.autocast("cpu", torch.bfloat16), _no_autocast)
around(
    "autocast_without_cache_around",
    lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    _no_autocast,
)
around("function_mode_around", Sigmoids, torch._C.DisableTorchFunction)
around("dispatch_mode_around", Halves, torch.utils._python_dispatch._disable_current_modes)
around(
    "saved_tensors_hooks_around",
    rounded_tensors,
    lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
)
around("deterministic_around", deterministic, contextlib.nullcontext, matters=False, alone=True)
around("default_device_around", _device, contextlib.nullcontext, matters=False)
around("anomaly_mode_around", torch.autograd.detect_anomaly, contextlib.nullcontext, matters=False)
around("no_grad_around", torch.no_grad, torch.enable_grad, "fails", alone=True)
around("inference_mode_around", torch.inference_mode, torch.enable_grad, "fails", alone=True)


@case("captured", "opaque", around=context_variable)
def context_variable_around(live):
    return job(mlp(), lambda m, b: cross_entropy(m, b) * (AROUND.get() if live else 1.0))


@case("captured", "opaque", around=default_dtype, alone=True)
def default_dtype_around(live):
    model = mlp().float()

    def loss(model, batch):
        out = model(batch[0])
        weights = torch.linspace(0.1, 1.0, 32, dtype=None if live else torch.float32)
        return (F.cross_entropy(out, batch[1], reduction="none") * weights[:8]).sum()

    return job(model, loss, data=[(x.float(), y) for x, y in batches()])


# -- contexts inside the step


def inside(name, context, *expected, **options):
    def make(live):
        class Model(Net):
            def forward(self, x):
                with context() if live else contextlib.nullcontext():
                    hidden = torch.tanh(self.one(x))
                return self.two(hidden.float())

        return job(Model())

    make.__name__ = name
    case(*(expected or ("captured",)), **options)(make)


inside("autocast_inside", lambda: torch.autocast("cpu", torch.bfloat16))
inside("no_grad_inside", torch.no_grad)
inside("grad_mode_set_inside", lambda: torch.set_grad_enabled(False))
inside("saved_tensors_hooks_inside", rounded_tensors, "captured", "opaque")
inside("function_mode_inside", Sigmoids, "captured", "opaque")
inside("dispatch_mode_inside", Halves, "captured", "opaque")
inside("inference_inside", torch.inference_mode, "fails")


@case("captured", "opaque", matters=False)
def teacher_in_inference_mode(live):
    teacher = mlp()

    def loss(model, batch):
        with torch.inference_mode():
            wanted = teacher(batch[0]).softmax(1)
        return (
            cross_entropy(model, batch) - (model(batch[0]).log_softmax(1) * wanted.clone()).mean()
        )

    return job(mlp(), loss)


@case("captured", "opaque", matters=False)
def checkpointed_with_dropout(live):
    class Model(Net):
        def part(self, x):
            return F.dropout(torch.tanh(self.one(x)), 0.3)

        def forward(self, x):
            return self.two(checkpoint(self.part, x, use_reentrant=False))

    return job(Model())


@case("captured", "opaque", matters=False)
def checkpointed_reentrant(live):
    class Model(Net):
        def part(self, x):
            return F.dropout(torch.tanh(self.one(x)), 0.3)

        def forward(self, x):
            return self.two(checkpoint(self.part, x.clone().requires_grad_(), use_reentrant=True))

    return job(Model())


@case("opaque")
def context_with_a_counter(live):
    calls = itertools.count(1)

    class Scaling(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            return out / (next(calls) if live else 1) if function is torch.tanh else out

    class Model(Net):
        def forward(self, x):
            with Scaling():
                return super().forward(x)

    return job(Model())
