"""Cases: the optimizer and its state are changed while it is at work."""

from __future__ import annotations

import copy
import functools
import operator

import torch
from torch import optim
from torch.optim import swa_utils

from tests.exactness.case import (
    EAGER,
    KEPT,
    Subject,
    adam,
    at,
    case,
    cross_entropy,
    every,
    job,
    mlp,
    sgd,
)

# -- changed in a callback


def changed(name, change, kind=None, *expected):
    """Enters a case whose callback changes the optimizer, or the weights through it, at step 4."""

    def make(live):
        model = mlp()
        optimizer = (kind or sgd)(model)
        act = at(4, live, lambda: change(optimizer))
        return job(model, optimizer=optimizer, on_step=act)

    make.__name__ = name
    case(*(expected or KEPT))(make)


def _set(**values):
    return lambda optimizer: optimizer.param_groups[0].update(values)


def _states(optimizer):
    return [optimizer.state[p] for p in optimizer.param_groups[0]["params"]]


changed("rate_changed", _set(lr=0.01))
changed("momentum_changed", _set(momentum=0.5))
changed("momentum_switched_off", _set(momentum=0.0))
changed("dampening_changed", _set(dampening=0.3))
changed("nesterov_switched_on", _set(nesterov=True))
changed("weight_decay_switched_on", _set(weight_decay=0.1))
changed("direction_turned", _set(maximize=True))
changed("betas_changed", _set(betas=(0.5, 0.9)), adam)
changed("epsilon_changed", _set(eps=1e-3), adam)
changed("decay_decoupled", _set(decoupled_weight_decay=True), adam)
changed("second_moments_scaled", lambda o: _states(o)[0]["exp_avg_sq"].mul_(9), adam)
changed("state_cleared", lambda o: o.state.clear())
changed("state_of_one_parameter_removed", lambda o: o.state.pop(o.param_groups[0]["params"][0]))
changed("state_scaled_in_place", lambda o: [s["momentum_buffer"].mul_(0.1) for s in _states(o)])
changed(
    "state_tensor_replaced",
    lambda o: _states(o)[0].update(momentum_buffer=torch.zeros(32, 16)),
)
changed("step_count_reset", lambda o: [s["step"].zero_() for s in _states(o)], adam)
changed(
    "weights_clamped", lambda o: [p.data.clamp_(-0.1, 0.1) for p in o.param_groups[0]["params"]]
)
changed("method_of_the_optimizer_patched", lambda o: setattr(o, "step", lambda: None), None, *EAGER)


@case(*KEPT)
def optimizer_state_loaded_back(live):
    model, kept = mlp(), []
    optimizer = adam(model)

    def change(step):
        if step == 3:
            kept.append(copy.deepcopy(optimizer.state_dict()))
        if step == 6:
            optimizer.load_state_dict(kept[0])

    return job(model, optimizer=optimizer, on_step=every(live, change))


@case(*KEPT)
def everything_loaded_back(live):
    """Back to the best weights so far, as early stopping and roll-backs do."""
    model, kept = mlp(), {}
    optimizer = adam(model)

    def change(step):
        if step == 3:
            kept.update(model=copy.deepcopy(model.state_dict()), state=optimizer.state_dict())
        if step == 6:
            model.load_state_dict(kept["model"])
            optimizer.load_state_dict(kept["state"])

    return job(model, optimizer=optimizer, on_step=every(live, change))


@case(*KEPT)
def group_added(live):
    model = mlp()
    optimizer = optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)
    group = {"params": list(model[0].parameters()), "lr": 0.02}
    return job(
        model, optimizer=optimizer, on_step=at(4, live, lambda: optimizer.add_param_group(group))
    )


@case(*KEPT)
def group_removed(live):
    model = mlp()
    groups = [{"params": layer.parameters()} for layer in (model[0], model[2])]
    optimizer = optim.SGD(groups, lr=0.1, momentum=0.9)
    return job(
        model, optimizer=optimizer, on_step=at(4, live, lambda: optimizer.param_groups.pop())
    )


@case("opaque", *KEPT)
def second_optimizer_stepped_by_the_callback(live):
    model = mlp()
    first, second = (optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2]))

    def change(step):
        second.step()
        second.zero_grad()

    return job(model, optimizer=first, on_step=every(live, change))


@case("opaque", *KEPT, matters=False)
def gradients_looked_at(live):
    model, norms = mlp(), []
    change = every(True, lambda step: norms.append([p.grad.norm() for p in model.parameters()]))
    return Subject(job(model, on_step=change), lambda: norms)


@case("opaque", *KEPT, matters=False)
def gradients_asked_for(live):
    model = mlp()
    gradients = []

    def look(parameters):
        gradients.append([p.grad.clone() for p in parameters])

    made = job(model, keep_grads=True, on_step=every(True, lambda s: look(model.parameters())))
    return Subject(made, lambda: gradients)


@case("opaque", *KEPT, matters=False)
def gradients_left_at_the_end(live):
    model = mlp()
    return Subject(job(model, keep_grads=True), lambda: [p.grad for p in model.parameters()])


# -- averages of the weights


@case(*KEPT, matters=False)
def stochastic_weight_averaging(live):
    model = mlp()
    optimizer = sgd(model)
    average = swa_utils.AveragedModel(model)
    slow = swa_utils.SWALR(optimizer, swa_lr=0.02, anneal_epochs=3)

    def change(step):
        if step > 4:
            average.update_parameters(model)
            slow.step()

    return Subject(job(model, optimizer=optimizer, on_step=every(True, change)), average.state_dict)


@case(*KEPT)
def moving_average_swapped_in(live):
    model = mlp()
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.7))

    def change(step):
        average.update_parameters(model)
        if step == 6:
            model.load_state_dict(average.module.state_dict())

    return Subject(job(model, on_step=every(live, change)), average.state_dict)


@case(*KEPT, matters=False)
def copies_of_the_model(live):
    model, kept = mlp(0.2), []
    made = job(model, on_step=every(True, lambda step: kept.append(copy.deepcopy(model))))
    return Subject(made, lambda: [copied.state_dict() for copied in kept])


# -- steps that compute with hyperparameters themselves, by whatever way they come to them


class _Keeper:
    """An object of the user's that has something."""

    def __init__(self, kept):
        self.kept = kept


GROUPS = []


def reads_a_rate(name, way):
    """Enters a job whose loss depends on a learning rate, which a callback changes.

    `way`: of an optimizer and a scheduler, what reads the rate in the step.
    """

    def make(live):
        model = mlp()
        optimizer = sgd(model)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        model.own = optimizer.param_groups if "module" in name else None
        GROUPS[:] = optimizer.param_groups
        rate = way(optimizer, scheduler, model)

        def loss(model, batch):
            return cross_entropy(model, batch) * (1 + rate())

        def change():
            optimizer.param_groups[0]["lr"] = 0.5

        return job(model, loss=loss, optimizer=optimizer, on_step=at(4, live, change))

    make.__name__ = f"rate_read_{name}"
    case(*KEPT, "opaque")(make)


def _of_group(optimizer, scheduler, model):
    group = optimizer.param_groups[0]
    return lambda: group["lr"]


def _of_kept(optimizer, scheduler, model):
    keeper = _Keeper(optimizer.param_groups[0])
    return lambda: keeper.kept["lr"]


def _of_tuple(optimizer, scheduler, model):
    kept = (optimizer, [{"inner": optimizer.param_groups}])
    return lambda: kept[1][0]["inner"][0]["lr"]


reads_a_rate("of_a_group", _of_group)
reads_a_rate("of_an_object", _of_kept)
reads_a_rate("of_containers", _of_tuple)
reads_a_rate("of_a_global", lambda o, s, m: lambda: GROUPS[0]["lr"])
reads_a_rate("of_the_optimizer", lambda o, s, m: lambda: o.param_groups[0]["lr"])
reads_a_rate("by_the_module", lambda o, s, m: lambda: m.own[0]["lr"])
reads_a_rate("by_getattr", lambda o, s, m: lambda: getattr(o, "param_" + "groups")[0]["lr"])
reads_a_rate("of_its_dict", lambda o, s, m: lambda: vars(o)["param_groups"][0]["lr"])
reads_a_rate("of_its_state_dict", lambda o, s, m: lambda: [*o.state_dict().values()][1][0]["lr"])
reads_a_rate("of_its_text", lambda o, s, m: lambda: float(str(o).split("lr: ")[1].split()[0]))
reads_a_rate("by_the_scheduler", lambda o, s, m: lambda: s.optimizer.param_groups[0]["lr"])
reads_a_rate("by_what_the_scheduler_says", lambda o, s, m: lambda: s.get_lr()[0])
reads_a_rate("by_items", lambda o, s, m: lambda: dict(o.param_groups[0].items())["lr"])
reads_a_rate(
    "of_a_partial", lambda o, s, m: functools.partial(operator.getitem, o.param_groups[0], "lr")
)
