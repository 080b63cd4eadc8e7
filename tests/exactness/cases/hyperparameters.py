"""Cases: hyperparameters that are no plain numbers, or come and go, changed by evaluations."""

from __future__ import annotations

import collections
from types import SimpleNamespace

import numpy as np
import torch
from torch.optim import lr_scheduler

from tests.exactness.case import KEPT, batches, case, job, mlp, sgd

_STEPS = 20


class _Rated(torch.optim.Optimizer):
    """Plain descent at a rate that `rate` makes of a group."""

    def __init__(self, parameters, rate, **others):
        super().__init__(parameters, {"lr": 0.1, **others})
        self.rate = rate

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad * self.rate(group))


def _trained(model, optimizer, changes):
    """A job that is evaluated after each step; the evaluations of these numbers make changes."""
    made = [0]

    def evaluate(model):
        made[0] += 1
        if made[0] in changes:
            changes[made[0]]()
        return 0.0

    return job(
        model, optimizer=optimizer, data=batches(_STEPS), evaluate=evaluate, evaluate_every=1
    )


def _entered(name, make):
    make.__name__ = name
    case(*KEPT)(make)


def _changed(rate, held, change, later):
    """What the group has under "held" is changed where it is; `later`: it comes in the middle."""

    def make(live):
        model, own = mlp(), held()
        optimizer = _Rated(model.parameters(), rate, held=None)
        group, changes = optimizer.param_groups[0], {}
        if later:
            changes[5] = lambda: group.update(held=own)
        else:
            group["held"] = own
        if live:
            changes[13] = lambda: change(own)
        return _trained(model, optimizer, changes)

    return make


def _of(read):
    return lambda group: 0.1 if group["held"] is None else read(group["held"])


#: How the rate is read, what is held, and how that is changed.
HELD = {
    "dictionary": (lambda h: h["a"], lambda: {"a": 0.1}, lambda h: h.update(a=0.5)),
    "list": (lambda h: h[1], lambda: ["a", 0.1], lambda h: h.__setitem__(1, 0.5)),
    "numbers": (lambda h: h[1], lambda: [0.2, 0.1], lambda h: h.__setitem__(1, 0.5)),
    "list_in_a_tuple": (lambda h: h[0][0], lambda: ([0.1],), lambda h: h[0].__setitem__(0, 0.5)),
    "array": (lambda h: float(h[0]), lambda: np.array([0.1]), lambda h: h.fill(0.5)),
    "set": (lambda h: 0.1 if 3 in h else 0.5, lambda: {3}, lambda h: h.discard(3)),
    "deque": (
        lambda h: h[0],
        lambda: collections.deque([0.1]),
        lambda h: h.__setitem__(0, 0.5),
    ),
    "tensor": (lambda h: h, lambda: torch.tensor(0.1), lambda h: h.fill_(0.5)),
}
for _name, (_read, _held, _change) in HELD.items():
    _entered(f"hyper_{_name}", _changed(_of(_read), _held, _change, False))
    _entered(f"hyper_{_name}_later", _changed(_of(_read), _held, _change, True))


def _keys(change):
    """A hyperparameter that comes or goes: the optimizer looks whether it is there."""

    def make(live):
        model = mlp()
        optimizer = _Rated(model.parameters(), lambda g: g["lr"] * g.get("boost", 1.0))
        group = optimizer.param_groups[0]
        group["other"] = 0.5
        return _trained(model, optimizer, {7: lambda: change(group)} if live else {})

    return make


_entered("hyper_comes", _keys(lambda group: group.update(boost=2.0)))
_entered("hyper_takes_anothers_place", _keys(lambda group: group.update(boost=group.pop("other"))))


@case(*KEPT)
def hyper_exchanged_for_an_equal_tensor(live):
    """A scheduler writes into the tensor that a rate is, which an equal one has replaced."""
    model = mlp()
    optimizer = sgd(model, lr=torch.tensor(0.05))
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)

    def evaluate(model):
        optimizer.param_groups[0]["lr"] = torch.tensor(0.05)
        return 0.0

    options = {"evaluate": evaluate, "evaluate_every": 7} if live else {}
    return job(
        model,
        optimizer=optimizer,
        data=batches(10),
        epochs=4,
        scheduler=scheduler,
        scheduler_every="epoch",
        **options,
    )


@case(*KEPT)
def hyper_vector_exchanged(live):
    """Its elements cannot be compared as one."""
    model = mlp()
    optimizer = _Rated(model.parameters(), lambda g: g["held"].mean(), held=torch.full((4,), 0.1))

    def exchange():
        optimizer.param_groups[0]["held"] = torch.full((4,), 0.3)

    return _trained(model, optimizer, {5: exchange} if live else {})


def _object(live):
    model, own = mlp(), SimpleNamespace(a=0.1)
    optimizer = _Rated(model.parameters(), lambda group: own.a if group["held"] else 0.0)
    optimizer.param_groups[0]["held"] = True

    return _trained(model, optimizer, {7: lambda: setattr(own, "a", 0.5)} if live else {})


_entered("hyper_beside_an_object", _object)


# -- what else an optimizer of one's own may read


class _Noted(_Rated):
    """It reads notes that schedulers leave with torch's optimizers, and state that is no tensor."""

    def __init__(self, parameters, of_parameter=lambda self, p: 1.0):
        super().__init__(parameters, lambda group: 0.1)
        self._step_count, self.of_parameter = 1, of_parameter

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                scale = self.of_parameter(self, parameter) / self._step_count
                parameter.sub_(parameter.grad * (0.1 * scale))


def _made_factor(self, parameter):
    return self.state[parameter].setdefault("factor", 1.0)


def _found_factor(self, parameter):
    return self.state[parameter].get("factor", 1.0) if parameter in self.state else 1.0


def _noted(change, *expected, of_parameter=lambda self, p: 1.0):
    def enter(name):
        def make(live):
            model = mlp()
            optimizer = _Noted(model.parameters(), of_parameter)
            parameters = [*model.parameters()]
            changes = {9: lambda: change(optimizer, parameters)} if live else {}
            return _trained(model, optimizer, changes)

        make.__name__ = name
        case(*expected)(make)

    return enter


def _count(optimizer, parameters):
    optimizer._step_count = 4


def _factor(optimizer, parameters):
    for parameter in parameters:
        optimizer.state[parameter]["factor"] = 3.0


_noted(_count, *KEPT)("optimizer_reads_a_note")
_noted(_factor, "opaque optimizer", of_parameter=_made_factor)("optimizer_state_is_plain")
_noted(_factor, *KEPT, "opaque optimizer", of_parameter=_found_factor)("optimizer_state_comes")
