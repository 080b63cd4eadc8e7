"""Python that asks whether a module or tensor is another, or looks something up by one: a trace has
copies of them. Each effect begins behind the step that checks the graph."""

import functools
import math
import weakref

import torch
from torch import nn

from tests.exactness.case import Net, case, cross_entropy, job, sgd

BEGIN = 6


class Holder:
    """An object that is no module."""

    def __init__(self, held):
        self.held = held


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held):
        self.held = held


class Counted(Net):
    """Its loss has a factor from some step on, by the buffer that counts them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def begun(self):
        self.steps += 1
        return (self.steps.detach() > BEGIN).float()


def asking(name, made, factor, expected=("opaque",)):
    """Enters a case whose loss has a factor that a question yields: `made` of the model is what is
    asked, by `factor` of the model and that."""

    def make(live):
        model = Counted()
        model.known = made(model)

        def loss(model, batch):
            begun = model.begun()
            found = factor(model, model.known) if live else 0.0
            return cross_entropy(model, batch) * (1 + found * begun)

        return job(model, loss, optimizer=sgd(model, momentum=0.0), steps=14)

    make.__name__ = name
    case(*expected)(make)


asking("keyed_by_a_module", lambda m: {m.two: 0.5}, lambda m, known: known.get(m.two, 0.0))
asking("keyed_by_a_weight", lambda m: {m.two.weight: 0.5}, lambda m, k: k.get(m.two.weight, 0.0))
asking("set_of_weights", lambda m: {m.two.weight}, lambda m, known: float(m.two.weight in known))
asking("frozen_set_of_modules", lambda m: frozenset({m.one}), lambda m, k: float(m.one in k))
asking(
    "weakly_keyed_by_a_module",
    lambda m: weakref.WeakKeyDictionary({m.two: 0.5}),
    lambda m, known: known.get(m.two, 0.0),
)
asking("identity_of_a_module", lambda m: {id(m.two)}, lambda m, known: float(id(m.two) in known))
asking("module_in_an_object", lambda m: Holder(m.two), lambda m, k: float(k.held is m.two))
asking("module_in_a_slot", lambda m: Slotted(m.two), lambda m, k: float(k.held is m.two))
asking(
    "weight_in_an_object",
    lambda m: Holder(m.two.weight),
    lambda m, k: float(k.held is m.two.weight),
)
asking("registry_held_twice", lambda m: m._parameters, lambda m, k: float(k is m._parameters))
asking(
    "modules_listed_in_an_object",
    lambda m: Holder([m.one, m.two]),
    lambda m, known: float(m.two in known.held),
)
asking("attribute_of_a_partial", lambda m: _scaled(), lambda m, k: k.scale, ("captured",))


def _with_gradient(model):
    tensor = torch.ones(2, requires_grad=True)
    tensor.sum().backward()
    return tensor


asking(
    "gradient_of_an_untrained_tensor",
    _with_gradient,
    lambda m, known: 0.0 if known.grad is None else 0.5,
)


def _scaled():
    made = functools.partial(torch.relu)
    made.scale = 0.5
    return made


@case("opaque")
def module_in_a_closure(live):
    model = Counted()
    chosen = [model.two]

    def loss(model, batch):
        begun = model.begun()
        pulled = sum(part.weight.norm() for part in model.children() if part in chosen)
        return cross_entropy(model, batch) + pulled * begun * live

    return job(model, loss, steps=14)


@case("captured")
def model_of_a_closure_alone(live):
    """The copies are met nowhere: what is asked is answered as in the loop."""
    model = Counted()
    known = {model.two: 0.5}

    def loss(_, batch):
        found = known[model.two] if live else 0.0
        return cross_entropy(model, batch) * (1 + found)

    return job(model, loss, steps=14)


class Drawn(torch.optim.Optimizer):
    """Descends, and draws parameters towards where they began, by a part: by nothing in the step
    that checks the graph."""

    def __init__(self, parameters, part_of=None):
        super().__init__(parameters, {"lr": 0.1, "part": 0.5})
        self.part_of = part_of

    def part(self, group, parameter):
        return self.part_of(group["part"])

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["first"] = parameter.clone()
                drift = parameter - state["first"]
                parameter.add_(parameter.grad, alpha=-group["lr"])
                parameter.add_(drift, alpha=-self.part(group, parameter))


class Chosen(Drawn):
    """Draws the parameters that it knows."""

    def __init__(self, parameters, live):
        super().__init__(parameters)
        self.chosen = {self.param_groups[0]["params"][0]} if live else set()

    def part(self, group, parameter):
        return 0.5 if parameter in self.chosen else 0.0


def drawn(make_optimizer):
    model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))
    return job(model, optimizer=make_optimizer(model.parameters()), steps=14)


@case("opaque", "opaque optimizer")
def optimizer_has_a_set_of_weights(live):
    return drawn(lambda parameters: Chosen(parameters, live))


def decayed(name, part):
    def make(live):
        part_of = part if live else lambda number: 0.25
        return drawn(lambda parameters: Drawn(parameters, part_of))

    make.__name__ = name
    case("captured", "recaptured", "opaque optimizer")(make)


def _of_an_exponent(number):
    return math.frexp(number)[1] + 0.125


def _of_a_type(number):
    return 0.5 if type(number) is float else 0.125


decayed("optimizer_rounds_a_plain_number", lambda number: int(float(number) * 10) / 10)
decayed("optimizer_looks_a_number_up", lambda number: {0.5: 0.4}.get(number, 0.1))
decayed("optimizer_reads_digits", lambda number: float(str(number)[:3]) + 0.125)
decayed("optimizer_reads_an_exponent", _of_an_exponent)
decayed("optimizer_asks_for_a_type", _of_a_type)
