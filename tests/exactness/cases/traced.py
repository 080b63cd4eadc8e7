"""Cases: the model asks how it is run, or what a tensor holds."""

from __future__ import annotations

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

from tests.exactness.case import Net, Subject, case, cross_entropy, job, mlp

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
