"""An optimizer's trace made for other shapes is the one that would have been made for these."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.optim import optimizer as optimizers

from tests.support.jobs import build
from tests.support.models import Mlp
from waterflow.capture import any_shapes, optimizer_cache
from waterflow.capture.any_shapes import AnyShapes
from waterflow.capture.forward import trace_forward
from waterflow.capture.join import gradient_layouts, join
from waterflow.capture.optimizer_cache import OptimizerTraces
from waterflow.job.batch import flatten
from waterflow.job.optimizer_state import state_layout
from waterflow.partitioner.graph.step_graph import tensors_of

pytestmark = pytest.mark.cpu

OPTIMIZERS = {
    "sgd": partial(optim.SGD, lr=0.1),
    "momentum": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd_foreach": partial(optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "sgd_fused": partial(optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "adam": partial(optim.Adam, lr=0.1),
    "amsgrad": partial(optim.Adam, lr=0.1, amsgrad=True, maximize=True),
    "adamw": optim.AdamW,
    "adamw_foreach": partial(optim.AdamW, foreach=True),
    "adamw_fused": partial(optim.AdamW, fused=True),
    "rmsprop": partial(optim.RMSprop, momentum=0.9, centered=True),
    "adagrad": partial(optim.Adagrad, lr_decay=0.1),
    "nadam": optim.NAdam,
    "adamax": optim.Adamax,
    "adadelta": optim.Adadelta,
}


class Deep(nn.Module):
    """Tensors of one to four dimensions, one of them without a gradient."""

    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(4, 4 * width)
        self.grid = nn.Conv2d(width, 2, 1)
        self.norm = nn.LayerNorm(3)
        self.unused = nn.Linear(width, 2)

    def forward(self, x):
        return self.norm(self.grid(self.inner(x).unflatten(1, (-1, 2, 2))).sum((2, 3)) @ HEAD)


HEAD = torch.ones(2, 3)


def traces_of(job, kept=None):
    """The job's step graphs, with what became of an optimizer's trace in `kept`."""
    forward = trace_forward(job, flatten(next(iter(job.data))))
    found = (kept or OptimizerTraces()).of(job, forward)
    return [(join(job, forward, trace), trace) for trace in found if trace is not None]


def memory_of(graph):
    """Which values of a graph are in which storage, as numbers in the order in which they come."""
    numbers: dict[int, int] = {}
    return [
        [numbers.setdefault(t.untyped_storage()._cdata, len(numbers)) for t in tensors_of(node)]
        for node in graph.graph.nodes
    ]


def seen(graph, trace):
    outputs = [(key, str(node)) for key, node in graph.outputs.items()]
    mutated = sorted(map(repr, graph.mutated))
    layouts = [sorted(map(repr, entries.items())) for entries in trace.state_after]
    return graph.fingerprint(), memory_of(graph), outputs, mutated, graph.plain_state, layouts


@pytest.mark.parametrize("clip", [None, 0.5], ids=["", "clipped"])
@pytest.mark.parametrize("model", [Mlp, Deep])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_graphs_are_those_of_a_trace_of_their_own(name, model, clip, monkeypatch):
    options = {"optimizer": OPTIMIZERS[name], "clip_grad_norm": clip}
    kept = OptimizerTraces()
    traces_of(build("narrow", partial(model, 5), **options), kept)
    job = build("wide", partial(model, 8), **options)
    with monkeypatch.context() as patched:
        patched.setattr(optimizer_cache, "trace_optimizer", None)  # nothing is traced
        found = [seen(*step) for step in traces_of(job, kept)]
    monkeypatch.setattr(AnyShapes, "of", lambda *_: None)
    assert found == [seen(*step) for step in traces_of(job)]


def of_job(job):
    forward = trace_forward(job, flatten(next(iter(job.data))))
    return AnyShapes.of(job, gradient_layouts(job, forward), state_layout(job.optimizer))


def tied(net, own):
    own.add_param_group({"params": [net.two.weight.data.view(-1).requires_grad_()]})


def transposed(net, own):
    net.one.weight.data = net.one.weight.data.t().contiguous().t()


def of_one_element(net, own):
    own.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def hooked(net, own):
    own.register_step_pre_hook(lambda *_: None)


def with_attribute(net, own):
    own.scale = 2


def with_step(net, own):
    step = own.step
    own.step = lambda closure=None: step(closure)


class Derived(optim.SGD):
    pass


@pytest.mark.parametrize(
    "change", [tied, transposed, of_one_element, hooked, with_attribute, with_step]
)
def test_what_may_depend_on_sizes_or_layouts_is_traced_as_it_is(change):
    own = partial(optim.SGD, lr=0.1)
    assert of_job(build("plain", Mlp, optimizer=own)) is not None
    assert of_job(build("changed", Mlp, optimizer=own, prepare=change)) is None


@pytest.mark.parametrize(
    "kind", [optim.Adafactor, optim.RAdam, partial(Derived, lr=0.1)], ids=["rows", "steps", "own"]
)
def test_other_optimizers_are_traced_as_they_are(kind):
    assert of_job(build("job", Mlp, optimizer=kind)) is None


def test_everybodys_hooks_are_code_of_others():
    handle = optimizers.register_optimizer_step_pre_hook(lambda *_: None)
    try:
        assert of_job(build("job", Mlp)) is None
    finally:
        handle.remove()


def test_code_put_into_torchs_module_is_seen(monkeypatch):
    def other(*arguments, **options):
        return None

    monkeypatch.setattr(sys.modules["torch.optim.sgd"], "_single_tensor_sgd", other)
    assert of_job(build("job", Mlp)) is None


class Halves(optim.SGD):
    """Works on the first half of each parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                count = p.numel() // 2
                p.view(-1)[:count].add_(p.grad.view(-1)[:count], alpha=-0.1)


def test_a_length_that_shows_in_a_trace_is_noticed(monkeypatch):
    monkeypatch.setattr(any_shapes, "_ELEMENTWISE", (Halves,))
    monkeypatch.setattr(any_shapes, "_is_untouched", lambda kind: True)
    job = build("job", Mlp, optimizer=partial(Halves, lr=0.1))
    kept = OptimizerTraces()
    ((graph, trace),) = traces_of(job, kept)
    assert trace.values is None
    assert kept._of_sizes
    monkeypatch.setattr(any_shapes, "_ELEMENTWISE", ())
    ((own, _),) = traces_of(job)
    assert graph.fingerprint() == own.fingerprint()
