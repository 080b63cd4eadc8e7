"""Cases: models of kinds that are hard to trace, and jobs that fail or insist on a graph."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import stateless

from tests.exactness.case import KEPT, Net, Subject, at, batches, case, cross_entropy, job, mlp

# -- kinds of models


def modelled(name, make_model, *expected):
    """Enters a case of a kind of model."""

    def make(live):
        return job(make_model())

    make.__name__ = name
    case(*(expected or ("captured", "opaque")), matters=False)(make)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(16, 4)

    def forward(self, x):
        if bool(x.sum() > 0):
            return self.one(x) * 2
        return self.one(x)


class ByFunction(Net):
    """The functional form of its own layers, with other weights."""

    def forward(self, x):
        halves = {name: p * 0.5 for name, p in self.one.named_parameters()}
        return self.two(torch.tanh(torch.func.functional_call(self.one, halves, (x,))))


class Mapped(Net):
    """Each row by itself, under vmap."""

    def forward(self, x):
        return torch.func.vmap(lambda row: self.two(torch.tanh(self.one(row))))(x)


class Tangents(Net):
    def forward(self, x):
        out, tangent = torch.func.jvp(super().forward, (x,), (torch.ones_like(x),))
        return out + 0.1 * tangent


class Penalized(Net):
    """The gradient of the output by the input is part of the output."""

    def forward(self, x):
        x = x.detach().requires_grad_()
        out = super().forward(x)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out + gradient.square().mean()


class PerRow(Net):
    """Gradients of each row, as differential privacy needs them."""

    def forward(self, x):
        weights = dict(self.one.named_parameters())

        def norm(weights, row):
            return torch.func.functional_call(self.one, weights, (row,)).square().sum()

        rows = torch.func.vmap(torch.func.grad(norm), (None, 0))(weights, x)
        return super().forward(x) * (1 + 0.01 * rows["bias"].norm(dim=1, keepdim=True))


class Ensemble(nn.Module):
    def __init__(self):
        super().__init__()
        self.members = nn.ModuleList(mlp() for _ in range(3))

    def forward(self, x):
        states = torch.func.stack_module_state(list(self.members))
        call = lambda p, b: torch.func.functional_call(self.members[0], (p, b), (x,))  # noqa: E731
        return torch.func.vmap(call)(*states).mean(0)


class LazilyScaled(Net):
    """Registers a buffer in its first forward pass."""

    def forward(self, x):
        if "scale" not in self._buffers:
            self.register_buffer("scale", torch.full((4,), 0.5))
        return super().forward(x) * self.scale


class Weighted(nn.Module):
    """Standardizes its weights before use, under no_grad, in place."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(16, 4)

    def forward(self, x):
        with torch.no_grad():
            self.one.weight.sub_(self.one.weight.mean(1, keepdim=True))
        return self.one(x)


class SelfReplacing(Net):
    def forward(self, x):
        self.two = nn.Identity() if isinstance(self.two, nn.Identity) else self.two
        return super().forward(x)


def _scripted(model):
    """Called before, as its first calls are measured and compiled, with other bits than later."""
    scripted = torch.jit.script(model)
    for _ in range(4):
        scripted(torch.ones(8, 16)).sum().backward()
    scripted.zero_grad()
    return scripted


modelled("vmapped", Mapped)
modelled("jvp_inside", Tangents)
modelled("gradient_inside", Penalized)
modelled("gradients_of_each_row", PerRow)
modelled("ensemble_stacked", Ensemble)
modelled("called_functionally", ByFunction)
modelled("scripted", lambda: _scripted(mlp()))
modelled("scripted_with_a_branch", lambda: _scripted(Branching()), "opaque")
modelled("traced_by_jit", lambda: torch.jit.trace(mlp(), torch.ones(8, 16)))
modelled("graph_module", lambda: torch.fx.symbolic_trace(mlp()))
modelled("compiled", lambda: torch.compile(mlp(), backend="eager"))
modelled("buffer_made_by_the_first_call", LazilyScaled, *KEPT, "opaque")
modelled("weights_standardized_in_place", Weighted)
modelled("assigns_its_own_layer", SelfReplacing)
modelled("wrapped_for_many_devices", lambda: nn.DataParallel(mlp()), "captured", "opaque")


@case(*KEPT, "opaque", matters=False)
def lazy_modules(live):
    """Weights get their shapes in the first step; the optimizer holds them before that."""
    return job(nn.Sequential(nn.LazyLinear(32), nn.Tanh(), nn.LazyLinear(4)))


@case("captured", "opaque")
def weights_by_a_reparametrized_call(live):
    model = mlp()

    def loss(model, batch):
        scale = 0.5 if live else 1.0
        weights = {name: p * scale for name, p in model.named_parameters()}
        return F.cross_entropy(stateless.functional_call(model, weights, batch[0]), batch[1])

    return job(model, loss)


@case("opaque")
def depth_by_chance(live):
    """Stochastic depth that asks for a number in each step."""

    class Model(Net):
        def __init__(self):
            super().__init__()
            self.extra = nn.Linear(16, 16)

        def forward(self, x):
            if live and torch.rand(1).item() < 0.5:
                x = x + self.extra(x)
            return super().forward(x)

    return job(Model())


@case("captured", "opaque")
def unrolled_by_the_length(live):
    """A loop over time whose length is in the batch's shape."""
    cell = nn.GRUCell(16, 4)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = cell

        def forward(self, x):
            state = x.new_zeros(8, 4)
            for row in x.unbind(1)[: None if live else 2]:
                state = self.cell(row, state)
            return state

    generator = torch.Generator().manual_seed(0)
    lengths = itertools.cycle([3, 5, 4])
    data = [
        (torch.randn(8, length, 16, generator=generator), torch.arange(8) % 4)
        for length in itertools.islice(lengths, 10)
    ]
    return job(Model(), data=data)


@case("refused")
def insists_on_a_graph(live):
    return job(Branching(), capture=True)


@case("refused")
def insists_on_a_graph_with_a_counter(live):
    seen = []

    def loss(model, batch):
        seen.append(1)
        return cross_entropy(model, batch) / len(seen)

    return job(mlp(), loss, capture=True)


@case("opaque", matters=False)
def wants_no_graph(live):
    return job(mlp(0.2), capture=False)


@case("fails")
def loss_without_a_gradient(live):
    return job(mlp(), lambda m, b: cross_entropy(m, b).detach())


@case("fails")
def raises_in_the_middle(live):
    class Model(Net):
        calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls == 5:
                raise ArithmeticError("the fifth step")
            return super().forward(x)

    model = Model()
    return Subject(job(model), lambda: model.calls)


@case("fails")
def callback_raises(live):
    def fail():
        raise ArithmeticError("the fourth step")

    return job(mlp(), on_step=at(4, True, fail))


@case("fails")
def data_raise(live):
    def some():
        yield from batches(4)
        raise ArithmeticError("the fifth batch")

    return job(mlp(), data=some())
