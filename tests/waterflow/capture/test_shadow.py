"""The user's model is never touched for a trace, and its shadow computes what it does."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch
from torch import nn, optim
from torch.nn.utils import parametrizations

import waterflow as wf
from tests.support.data import cross_entropy, rows
from tests.support.differences import MEMORY, assert_same_numbers
from tests.support.models import Recurrent, Tied
from waterflow.capture.shadow import Shadow, UnkeptChangeError

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]


class Hooked(nn.Module):
    """A hook and a callable that are bound to it."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 3)
        self.one.register_forward_hook(self.scaled)
        self.method = self.head

    def scaled(self, module, inputs, output):
        return output * self.two.weight.mean()

    def head(self, x):
        return self.two(x)

    def forward(self, x):
        return self.method(self.one(x))


class Child(nn.Module):
    """Knows its parent by a weak reference, as a registry would not allow a strong one."""

    def __init__(self, parent):
        super().__init__()
        self.parent = weakref.ref(parent)

    def forward(self, x):
        return x @ self.parent().two.weight.T


class Weak(nn.Module):
    def __init__(self):
        super().__init__()
        self.two = nn.Linear(4, 3, bias=False)
        self.child = Child(self)

    def forward(self, x):
        return self.child(x)


class Held(nn.Module):
    """Has tensors and modules in plain containers, too."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 3)
        self.order = [self.one, torch.tanh, self.two]
        self.named = {"bias": self.two.bias, "deep": ({"w": self.one.weight},)}

    def forward(self, x):
        for part in self.order:
            x = part(x)
        return x + self.named["bias"] + self.named["deep"][0]["w"].mean()


def parametrized():
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(4, 6)),
        nn.Tanh(),
        parametrizations.spectral_norm(nn.Linear(6, 3)),
    )


MODELS = {
    "lstm": (lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True), "tokens"),
    "gru": (lambda: Recurrent(nn.GRU), "tokens"),
    "tied": (Tied, "tokens"),
    "parametrized": (parametrized, "rows"),
    "hooked": (Hooked, "rows"),
    "weak": (Weak, "rows"),
    "held": (Held, "rows"),
}
named = pytest.mark.parametrize("name", MODELS)


def job_of(name, steps=6):
    model, kind = MODELS[name]
    torch.manual_seed(11)
    net = model()
    data = [rows(n, kind) for n in (8, 6, 4, 2)] * (steps // 2)
    optimizer = optim.AdamW(net.parameters(), lr=0.02)
    return wf.Job(
        "a", model=net, optimizer=optimizer, loss=cross_entropy, data=data[:steps], seed=5
    )


def everything(model):
    """All attributes of all modules, by identity."""
    return {
        (name, key): (id(value), list(map(id, value.values())) if type(value) is dict else None)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
    }


@named
def test_a_model_is_captured_and_equal(name):
    job, expected = job_of(name), job_of(name)
    report = wf.run([job], memory=MEMORY, threads=1).jobs["a"]
    assert report.captured == "captured", report.notes
    assert_same_numbers(expected, wf.run_eager(expected, threads=1), job, report)


@named
def test_nobody_sees_the_model_changed_while_it_is_traced(name):
    job = job_of(name, steps=8)
    before = everything(job.model)
    seen, errors, done = [], [], threading.Event()

    def look():
        try:
            while not done.is_set():
                seen.append(everything(job.model) == before)
                for tensor in job.model.state_dict().values():
                    assert type(tensor) is torch.Tensor
                    # A copy, as it reads each number twice: a step may change it in between.
                    assert tensor.clone().isfinite().all()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        report = wf.run([job], memory=MEMORY, threads=1)
    finally:
        done.set()
        thread.join()
    assert report.ok
    assert errors == []
    assert seen
    assert all(seen)


def shadow_of(model):
    twins = {id(t): nn.Parameter(torch.ones_like(t)) for t in model.parameters()}
    return Shadow(model, twins), twins


def test_a_shadow_has_its_own_modules_and_tensors_everywhere():
    model = Held()
    shadow, twins = shadow_of(model)
    copy = shadow.model
    assert type(copy) is Held
    assert copy.order[0] is copy.one
    assert copy.named["bias"] is copy.two.bias is twins[id(model.two.bias)]
    assert copy.named["deep"][0]["w"] is copy.one.weight
    assert model.order[0] is model.one
    shadow.check()


def test_bound_methods_and_weak_references_lead_to_the_shadow():
    hooked, _ = shadow_of(Hooked())
    assert hooked.model.method.__self__ is hooked.model
    (hook,) = hooked.model.one._forward_hooks.values()
    assert hook.__self__ is hooked.model
    weak, _ = shadow_of(Weak())
    assert weak.model.child.parent() is weak.model


CHANGES = {
    "parameter 'weight'": lambda m: setattr(m.one, "weight", nn.Parameter(torch.ones(6, 4))),
    "gains or loses": lambda m: m.register_buffer("late", torch.ones(1)),
    "gains the module": lambda m: m.add_module("late", nn.Tanh()),
    "a module comes or goes": lambda m: delattr(m, "one"),
    "attribute 'count'": lambda m: setattr(m, "count", 1),
    "attribute 'order'": lambda m: m.order.append(torch.tanh),
}


@pytest.mark.parametrize("words", CHANGES)
def test_what_a_graph_would_not_do_is_said(words):
    model = Held()
    before = everything(model)
    shadow, _ = shadow_of(model)
    CHANGES[words](shadow.model)
    with pytest.raises(UnkeptChangeError, match=words):
        shadow.check()
    assert everything(model) == before
