"""Cases: the model asks how it is run, or what a tensor holds."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import pickle
import threading

import torch
import torch.nn.functional as F
import torch.utils.serialization  # by the first pickle of a tensor: within a step, code of its own
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from tests.exactness.case import Net, Subject, batches, case, cross_entropy, job, mlp

UNCHANGED = ("captured", "opaque")
REGISTRY: dict[str, nn.Module] = {}


def asking(question, live):
    """A model that doubles its output where the answer is what a trace would give."""

    class Model(Net):
        def factor(self, x):
            return 1.0 if question(self, x) else 2.0

    class Frozen(Net):
        def factor(self, x):
            return 2.0

    return Model() if live else Frozen()


def asks(name, question, *expected, **options):
    """Enters a case for a question that the plain loop answers with yes."""

    def make(live):
        return job(asking(question, live))

    make.__name__ = name
    case(*(expected or UNCHANGED), **options)(make)


def _in_trace():
    return any(
        "fake_tensor" in frame.filename or "tracing" in frame.filename for frame in inspect.stack(0)
    )


asks("asks_for_fake_tensors", lambda self, x: not isinstance(x, FakeTensor))
asks("asks_for_the_type_of_its_input", lambda self, x: type(x) is torch.Tensor)
asks("asks_for_the_type_of_its_weight", lambda self, x: type(self.one.weight) is nn.Parameter)
asks("asks_for_an_attribute_of_fake_tensors", lambda self, x: not hasattr(x, "fake_mode"))
asks("asks_whether_it_is_compiled", lambda self, x: not torch.compiler.is_compiling())
asks("asks_whether_it_is_exported", lambda self, x: not torch.compiler.is_exporting())
asks("asks_whether_it_is_traced", lambda self, x: not torch.jit.is_tracing())
asks("asks_whether_it_is_scripted", lambda self, x: not torch.jit.is_scripting())
asks("asks_for_dispatch_modes", lambda self, x: _get_current_dispatch_mode() is None)
asks("asks_for_function_modes", lambda self, x: torch._C._len_torch_function_stack() == 0)
asks("asks_for_gradients_to_be_on", lambda self, x: torch.is_grad_enabled())
asks("asks_for_autocast", lambda self, x: not torch.is_autocast_enabled("cpu"))
asks("asks_for_the_stack", lambda self, x: not _in_trace())
asks("asks_for_a_leaf", lambda self, x: x.is_leaf and self.one.weight.is_leaf)
asks("asks_for_gradients_that_are_gone", lambda self, x: self.one.weight.grad is None)
asks("asks_for_the_address", lambda self, x: x.data_ptr() == x[:1].data_ptr() != 0)
asks("asks_for_the_storage", lambda self, x: x.untyped_storage().nbytes() == 512)
asks("asks_for_the_device", lambda self, x: x.device == torch.device("cpu") and x.is_cpu)
asks("asks_for_the_text", lambda self, x: "Fake" not in repr(x) and "[" in str(x), "opaque")
asks("asks_for_a_sum", lambda self, x: bool(x.sum() == x.sum()), "opaque")
asks("asks_for_an_equal", lambda self, x: torch.equal(x, x.clone()), "opaque")
asks("asks_for_a_copy", lambda self, x: type(copy.copy(x)) is torch.Tensor)


@case(*UNCHANGED)
def asks_for_the_model_outside(live):
    """The model that runs must be the one that the user holds."""

    class Model(Net):
        def factor(self, x):
            return 1.0 if REGISTRY["model"] is self else 2.0

    class Frozen(Net):
        def factor(self, x):
            return 2.0

    made = Model() if live else Frozen()
    REGISTRY["model"] = made
    return job(made)


@case("opaque")
def asks_for_the_version_of_a_weight(live):
    class Model(Net):
        def factor(self, x):
            return 1 / (1 + (self.one.weight._version if live else 0))

    return job(Model())


@case("opaque", "captured", matters=False)
def asks_for_its_thread(live):
    """Whatever its name is, a step that keeps something by thread finds it again."""
    names = set()

    class Model(Net):
        def factor(self, x):
            names.add(threading.current_thread().name)
            return float(len(names))

    return job(Model())


@case("opaque")
def keeps_something_by_thread(live):
    calls = {}

    class Model(Net):
        def factor(self, x):
            me = threading.get_ident()
            calls[me] = calls.get(me, 0) + 1
            return 1 / (calls[me] if live else 1)

    return job(Model())


# -- values of tensors


@case("opaque")
def branches_on_a_value(live):
    class Model(Net):
        def factor(self, x):
            return 2.0 if live and x.mean() > 0 else 1.0

    return job(Model())


@case("opaque")
def reads_a_number(live):
    class Model(Net):
        def factor(self, x):
            return x.abs().max().item() if live else 2.0

    return job(Model())


@case("opaque")
def reads_a_list(live):
    class Model(Net):
        def factor(self, x):
            return max(x[0].tolist()) if live else 2.0

    return job(Model())


@case("opaque")
def reads_an_array(live):
    class Model(Net):
        def factor(self, x):
            return float(x.numpy().std()) if live else 2.0

    return job(Model())


@case("opaque")
def reads_a_pickle(live):
    class Model(Net):
        def factor(self, x):
            return pickle.loads(pickle.dumps(x))[0, :4] if live else 2.0

    return job(Model())


@case("opaque", "captured")
def stops_when_a_value_is_small(live):
    class Model(Net):
        def forward(self, x):
            hidden = self.one(x)
            for _ in itertools.repeat(None, 20):
                if not live or hidden.norm() < 4:
                    break
                hidden = hidden * 0.9
            return self.two(hidden)

    return job(Model())


@case("opaque")
def chooses_rows(live):
    class Model(Net):
        def forward(self, x):
            hidden = torch.tanh(self.one(x))
            rows = (x[:, 0] > 0).nonzero().flatten() if live else torch.arange(4)
            return self.two(hidden.index_add(0, rows, hidden[rows]))

    return job(Model())


@case("opaque")
def masks_to_a_new_shape(live):
    def loss(model, batch):
        keep = batch[1] > 0
        out = model(batch[0])
        return F.cross_entropy(out[keep], batch[1][keep]) if live else cross_entropy(model, batch)

    return job(mlp(), loss)


@case("opaque")
def counts_classes(live):
    def loss(model, batch):
        found = len(batch[1].unique()) if live else 1
        return cross_entropy(model, batch) / found

    return job(mlp(), loss)


@case("opaque", matters=False)
def routes_to_experts(live):
    class Model(Net):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
            self.gate = nn.Linear(16, 3)

        def forward(self, x):
            chosen, out = self.gate(x).argmax(1), torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                rows = (chosen == number).nonzero().flatten()
                if len(rows):
                    out = out.index_add(0, rows, expert(x[rows]))
            return super().forward(x + out)

    return job(Model())


@case("opaque")
def tries_and_falls_back(live):
    class Model(Net):
        def factor(self, x):
            try:
                return 2.0 if live and float(x[0, 0]) > 0 else 1.0
            except Exception:
                return 3.0

    return job(Model())


@case("opaque")
def counts_exceptions(live):
    caught = []

    class Model(Net):
        def factor(self, x):
            try:
                raise KeyError
            except KeyError as error:
                caught.append(str(error))
            return 1 / (len(caught) if live else 1)

    return Subject(job(Model()), lambda: len(caught))


@case("captured")
def branches_on_a_shape(live):
    """What depends on shapes alone stays a graph: one for each shape."""
    generator = torch.Generator().manual_seed(0)
    sizes = [8, 8, 5, 8, 5, 8, 8, 5, 8, 3]
    data = [
        (torch.randn(n, 16, generator=generator), torch.zeros(n, dtype=torch.long)) for n in sizes
    ]

    class Model(Net):
        def factor(self, x):
            return 2.0 if live and len(x) < 8 else 1.0

    return job(Model(), data=data)


# -- refusals that the step's Python catches, and what a trace leaves out


def flagged(live):
    """Batches with a flag that some of the later ones have."""
    return [
        (*batch, torch.tensor(float(live and n in (4, 5, 7)))) for n, batch in enumerate(batches())
    ]


def catching(name, read):
    """Enters a case whose loss reads a batch's flag, where what a trace raises is caught."""

    def make(live):
        def loss(model, batch):
            return cross_entropy(model, batch) * (1 + read(batch[2]))

        return job(mlp(), loss, data=flagged(live))

    make.__name__ = name
    case("opaque")(make)


def _tried(flag, read):
    try:
        return read(flag)
    except Exception:
        return 0.0


def _suppressed(flag):
    with contextlib.suppress(Exception):
        return float(flag.numpy())
    return 0.0


class _Swallows:
    def __enter__(self):
        return self

    def __exit__(self, *error):
        return True


def _swallowed(flag):
    with _Swallows():
        return 1.0 if flag > 0 else 0.0
    return 0.0


catching("catches_a_refused_number", lambda flag: _tried(flag, torch.Tensor.item))
catching("catches_a_refused_shape", lambda flag: _tried(flag, lambda t: len(t.nonzero())))
catching("catches_a_refused_array", _suppressed)
catching("swallows_a_refused_branch", _swallowed)
catching("reads_a_text", lambda flag: float(repr(flag) == "tensor(1.)"))
catching("reads_a_formatted_text", lambda flag: float("1." in f"{flag[None]}"))
catching("asks_for_the_type_and_a_value", lambda t: float(type(t) is torch.Tensor and t > 0))
catching("asks_for_fakes_and_a_value", lambda t: float(not isinstance(t, FakeTensor) and t > 0))


def _of_torchs_package(tensor):
    return float(isinstance(tensor, torch._subclasses.FakeTensor) or tensor > 0)


def _imported_here(tensor):
    from torch._subclasses import FakeTensor

    return float(isinstance(tensor, FakeTensor) or tensor > 0)


def _imported_of_its_module(tensor):
    from torch._subclasses.fake_tensor import FakeTensor

    return float(isinstance(tensor, FakeTensor) or tensor > 0)


def _had_before(tensor):
    is_fake = isinstance(tensor, FakeTensor) or not torch._subclasses
    return float(is_fake or tensor > 0)


catching("asks_torchs_package_for_fakes", _of_torchs_package)
catching("asks_for_fakes_by_an_import", _imported_here)
catching("asks_for_fakes_of_their_module", _imported_of_its_module)
catching("asks_for_fakes_by_a_global", _had_before)


@case("opaque")
def catches_a_refused_number_of_a_gradient(live):
    def halved(gradient):
        try:
            return gradient / 2 if live and gradient.max().item() > 0.04 else gradient
        except RuntimeError:
            return gradient

    def loss(model, batch):
        out = model(batch[0])
        out.register_hook(halved)
        return F.cross_entropy(out, batch[1])

    return job(mlp(), loss)


@case("captured", "opaque", matters=False)
def catches_what_the_loop_raises_too(live):
    def loss(model, batch):
        with contextlib.suppress(RuntimeError):
            model(batch[0][:, :3])
        return cross_entropy(model, batch)

    return job(mlp(), loss)


def checking(name, outcomes, check):
    """Enters a case whose loss makes torch look at a factor that is 0 in a later batch."""

    def make(live):
        data = [(*b, torch.tensor(float(n != 6 or not live))) for n, b in enumerate(batches())]

        def loss(model, batch):
            weight = model[-1].weight
            matrix = (weight @ weight.T + torch.eye(4)) * batch[2]
            return cross_entropy(model, batch) + 0.001 * check(matrix, batch[2])

        return job(mlp(), loss, data=data)

    make.__name__ = name
    case(*outcomes)(make)


def _asserted(matrix, factor):
    torch._assert_async(factor > 0)
    return factor


FAILS = ("fails",)
checking("inverse_that_is_not_there", FAILS, lambda m, _: torch.linalg.inv(m).sum())
checking("factors_that_are_not_there", FAILS, lambda m, _: torch.linalg.cholesky(m).sum())
checking(
    "checked_factors", FAILS, lambda m, _: torch.linalg.cholesky_ex(m, check_errors=True)[0].sum()
)
checking("solution_that_is_not_there", FAILS, lambda m, _: torch.linalg.solve(m, m).sum())
checking("power_that_is_not_there", FAILS, lambda m, _: torch.linalg.matrix_power(m, -1).sum())
checking("assertion_on_the_device", FAILS, _asserted)


@case("fails")
def class_that_is_not_there(live):
    data = [(x, y + 9 * (n == 6 and live)) for n, (x, y) in enumerate(batches())]

    def loss(model, batch):
        return -(model(batch[0]).log_softmax(1) * F.one_hot(batch[1], 4)).sum(1).mean()

    return job(mlp(), loss, data=data)


@case("captured", matters=False)
def classes_that_are_there(live):
    def loss(model, batch):
        return -(model(batch[0]).log_softmax(1) * F.one_hot(batch[1], 4)).sum(1).mean()

    return job(mlp(), loss)
