"""Cases: steps of the user's own, captured as a whole, and what changes them between two steps."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

import waterflow as wf
from tests.exactness.case import (
    KEPT,
    Subject,
    adam,
    at,
    batches,
    case,
    cross_entropy,
    every,
    mlp,
    sgd,
)

CAPTURED = ("captured",)


class Pair:
    """A network and its slow copy, each with an optimizer, and a step that may do anything."""

    def __init__(self) -> None:
        torch.manual_seed(11)
        self.model, self.other = mlp(0.2), mlp()
        self.first, self.second = adam(self.model), sgd(self.other, lr=0.05)
        self.factor = 1.0

    def step(self, batch):
        self.first.zero_grad()
        value = cross_entropy(self.model, batch) * self.factor
        value.backward()
        self.first.step()
        self.second.zero_grad()
        with torch.no_grad():
            target = self.model(batch[0]).softmax(1)
        other = F.kl_div(self.other(batch[0]).log_softmax(1), target, reduction="batchmean")
        other.backward()
        self.second.step()
        return value, {"other": other}

    def gradients(self):
        parameters = [*self.model.parameters(), *self.other.parameters()]
        return [None if p.grad is None else p.grad.clone() for p in parameters]

    def subject(self, step=None, **options):
        options.setdefault("data", batches())
        made = wf.Job(
            "case",
            model={"model": self.model, "other": self.other},
            optimizers=[self.first, self.second],
            step=step or self.step,
            seed=5,
            **options,
        )
        return Subject(made, self.gradients)


def entered(name, make, *expected, **options):
    make.__name__ = name
    case(*(expected or CAPTURED), **options)(make)


def steady(name, *expected, **options):
    """Enters a step that nothing changes: made by a function of the pair, `step(pair, batch)`."""

    def enter(step):
        def make(live):
            pair = Pair()
            return pair.subject(lambda batch: step(pair, batch), **options)

        entered(name, make, *expected, matters=False)
        return step

    return enter


def changed(name, *expected, **options):
    """Enters a change of the pair after the fourth step."""

    def enter(change):
        def make(live):
            pair = Pair()
            return pair.subject(on_step=at(4, live, lambda: change(pair)), **options)

        entered(name, make, *(expected or KEPT))
        return change

    return enter


# -- steps of many kinds


@steady("whole_two_optimizers")
def _two(pair, batch):
    return pair.step(batch)


@steady("whole_of_a_method")
def _method(pair, batch):
    return Pair.step(pair, batch)


def _bound(live):
    return Pair().subject()


entered("whole_bound_method", _bound, matters=False)


@steady("whole_gradients_dropped_at_the_end")
def _dropped(pair, batch):
    value = cross_entropy(pair.model, batch)
    value.backward()
    pair.first.step()
    pair.first.zero_grad()
    return value


@steady("whole_gradients_never_dropped")
def _summed(pair, batch):
    """Each step adds to the gradients of all before it."""
    value = cross_entropy(pair.model, batch)
    value.backward()
    pair.first.step()
    return value


@steady("whole_gradients_set_to_zero")
def _zeroed(pair, batch):
    pair.first.zero_grad(set_to_none=False)
    value = cross_entropy(pair.model, batch)
    value.backward()
    pair.first.step()
    return value


@steady("whole_momentum_of_gradients")
def _momentum(pair, batch):
    """What the step before has left is read before it goes."""
    former = [p.grad for p in pair.model.parameters()]
    pair.first.zero_grad()
    value = cross_entropy(pair.model, batch)
    value.backward()
    for parameter, gradient in zip(pair.model.parameters(), former, strict=True):
        if gradient is not None:
            parameter.grad.add_(gradient, alpha=0.5)
    pair.first.step()
    return value


@steady("whole_steps_twice")
def _twice(pair, batch):
    for rows in batch[0].split(4):
        pair.first.zero_grad()
        value = pair.model(rows).square().mean()
        value.backward()
        pair.first.step()
    return value


@steady("whole_clipped")
def _clipped(pair, batch):
    pair.first.zero_grad()
    value = cross_entropy(pair.model, batch)
    value.backward()
    norm = nn.utils.clip_grad_norm_(pair.model.parameters(), 0.1)
    nn.utils.clip_grad_value_(pair.model.parameters(), 0.01)
    pair.first.step()
    return value, {"norm": norm}


@steady("whole_slow_copy_by_data")
def _slow(pair, batch):
    pair.first.zero_grad()
    value = cross_entropy(pair.model, batch)
    value.backward()
    pair.first.step()
    for slow, fast in zip(pair.other.parameters(), pair.model.parameters(), strict=True):
        slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
    return value


@steady("whole_gradient_penalty")
def _penalty(pair, batch):
    """A gradient of a gradient."""
    rows = batch[0].clone().requires_grad_(True)
    pair.first.zero_grad()
    made = pair.model(rows)
    (slope,) = torch.autograd.grad(made.sum(), rows, create_graph=True)
    value = F.cross_entropy(made, batch[1]) + (slope.norm(dim=1) - 1).square().mean()
    value.backward()
    pair.first.step()
    return value


@steady("whole_gradients_by_function")
def _by_function(pair, batch):
    parameters = list(pair.model.parameters())
    value = cross_entropy(pair.model, batch)
    for parameter, gradient in zip(parameters, torch.autograd.grad(value, parameters), strict=True):
        parameter.grad = gradient.sign()
    pair.first.step()
    return value


@steady("whole_gradients_exchanged")
def _exchanged_gradients(pair, batch):
    """Each of two parameters is left with the gradient of the other, and adds to it."""
    pair.first.zero_grad(set_to_none=False)
    one, two = pair.other[0].weight, pair.model[0].weight
    (cross_entropy(pair.model, batch) + cross_entropy(pair.other, batch)).backward()
    one.grad, two.grad = two.grad, one.grad
    pair.first.step()
    pair.second.step()
    return cross_entropy(pair.model, batch)


@steady("whole_freezes_and_thaws")
def _freezes(pair, batch):
    pair.first.zero_grad()
    pair.second.zero_grad()
    pair.other.requires_grad_(False)
    value = pair.other(pair.model(batch[0]).repeat(1, 4)).square().mean()
    value.backward()
    pair.first.step()
    pair.other.requires_grad_(True)
    other = cross_entropy(pair.other, batch)
    other.backward()
    pair.second.step()
    return value, {"other": other}


@steady("whole_evaluates_within")
def _evaluates(pair, batch):
    pair.first.zero_grad()
    pair.model.eval()
    with torch.no_grad():
        target = pair.model(batch[0])
    pair.model.train()
    value = F.mse_loss(pair.model(batch[0]), target)
    value.backward()
    pair.first.step()
    return value


@steady("whole_update_written_out")
def _written(pair, batch):
    pair.first.zero_grad()
    value = cross_entropy(pair.model, batch)
    value.backward()
    with torch.no_grad():
        for parameter in pair.model.parameters():
            parameter -= 0.1 * parameter.grad
    return value


@steady("whole_last_batch_is_short", *KEPT, data=[*batches(4), *batches(1, 3)], epochs=4)
def _short(pair, batch):
    return pair.step(batch)


@steady("whole_short_batches_add_up", *KEPT, data=[*batches(4), *batches(1, 3)], epochs=4)
def _short_sums(pair, batch):
    """The gradients of the step before are dropped by some shapes of batches alone."""
    if len(batch[0]) == 8:
        pair.first.zero_grad()
    value = cross_entropy(pair.model, batch)
    value.backward()
    pair.first.step()
    return value


@steady("whole_step_that_reads_state")
def _state(pair, batch):
    pair.first.zero_grad()
    value = cross_entropy(pair.model, batch)
    value.backward()
    pair.first.step()
    told = [pair.first.state[p]["exp_avg"].abs().max() for p in pair.model.parameters()]
    return value, {"most": torch.stack(told).max()}


@steady("whole_loss_of_a_weight")
def _weight(pair, batch):
    """A view of a weight, which is read when all is done."""
    pair.step(batch)
    return pair.model[0].weight[0, 0]


# -- steps that cannot be captured


@steady("whole_reads_its_loss", "opaque")
def _reads(pair, batch):
    value, _ = pair.step(batch)
    return value.item()


@steady("whole_by_the_class", "opaque")
def _by_class(pair, batch):
    pair.first.zero_grad()
    value = cross_entropy(pair.model, batch)
    value.backward()
    torch.optim.Adam.step(pair.first)
    return value


def _counted(live):
    pair = Pair()
    pair.made = 0

    def step(batch):
        pair.made += 1
        pair.second.zero_grad()
        other = cross_entropy(pair.other, batch)
        other.backward()
        if pair.made % 3 == 0 or not live:
            pair.second.step()
        return pair.step(batch)

    return pair.subject(step)


entered("whole_that_counts", _counted, "opaque")


def _tunes(live):
    pair = Pair()

    def step(batch):
        told = pair.step(batch)
        if live:
            for group in pair.first.param_groups:
                group["lr"] *= 0.5
        return told

    return pair.subject(step)


entered("whole_that_tunes_itself", _tunes, "opaque")


def _stranger(live):
    """A module that the job does not know gets gradients, which its loop would add up."""
    pair, stranger = Pair(), mlp()

    def step(batch):
        pair.first.zero_grad()
        value = F.mse_loss(pair.model(batch[0]), stranger(batch[0]))
        value.backward()
        pair.first.step()
        scale = stranger[0].weight.grad.abs().mean() if live else 1.0
        return value * scale

    return pair.subject(step)


entered("whole_with_a_stranger", _stranger, "opaque")


# -- what others change between two steps


@changed("whole_rate_changed")
def _rate(pair):
    pair.second.param_groups[0]["lr"] = 0.5


@changed("whole_rate_becomes_zero")
def _no_rate(pair):
    pair.first.param_groups[0]["lr"] = 0.0


@changed("whole_factor_changed")
def _factor(pair):
    pair.factor = 3.0


@changed("whole_module_replaced")
def _replaced(pair):
    torch.manual_seed(3)
    pair.model[0] = nn.Linear(16, 32)


@changed("whole_weights_changed")
def _weights(pair):
    with torch.no_grad():
        pair.model[0].weight.mul_(2)


@changed("whole_frozen")
def _frozen(pair):
    pair.model[0].requires_grad_(False)


@changed("whole_modes_changed")
def _modes(pair):
    pair.model.eval()


@changed("whole_state_dropped")
def _dropped_state(pair):
    pair.first.state.clear()


@changed("whole_another_optimizer_inside", "opaque")  # whoever makes one may step it
def _swapped(pair):
    pair.first = torch.optim.SGD(pair.model.parameters(), lr=0.3)


def _replaced_step(live):
    pair = Pair()

    def other(batch):
        pair.factor = 2.0
        return pair.step(batch)

    subject = pair.subject()
    subject.job.on_step = at(4, live, lambda: setattr(subject.job, "step", other))
    return subject


entered("whole_another_step", _replaced_step, *KEPT, "opaque")


def _scheduled(live):
    pair = Pair()
    subject = pair.subject()
    if live:
        subject.job.scheduler = torch.optim.lr_scheduler.ExponentialLR(pair.first, 0.7)
    return subject


entered("whole_scheduled", _scheduled)


def _both_scheduled(live):
    pair = Pair()
    kind = torch.optim.lr_scheduler.StepLR
    schedulers = [kind(pair.first, 2, 0.5), kind(pair.second, 3, 0.1)] if live else None
    return pair.subject(schedulers=schedulers)


entered("whole_both_scheduled", _both_scheduled)


def _reads_rate(live):
    """The step itself computes with a learning rate that a scheduler moves."""
    pair = Pair()

    def step(batch):
        rate = pair.first.param_groups[0]["lr"]
        told, metrics = pair.step(batch)
        with torch.no_grad():
            pair.other[0].weight.mul_(1 - rate)
        return told, metrics

    subject = pair.subject(step)
    if live:
        subject.job.scheduler = torch.optim.lr_scheduler.ExponentialLR(pair.first, 0.7)
    return subject


entered("whole_that_reads_a_rate", _reads_rate, *KEPT, "opaque")


def _looks_at_rate(live):
    """The same by a name that no code spells out."""
    pair, name = Pair(), "_".join(["param", "groups"])

    def step(batch):
        rate = getattr(pair.first, name)[0]["lr"]
        told, metrics = pair.step(batch)
        with torch.no_grad():
            pair.other[0].weight.mul_(1 - rate)
        return told, metrics

    subject = pair.subject(step)
    if live:
        subject.job.scheduler = torch.optim.lr_scheduler.ExponentialLR(pair.first, 0.7)
    return subject


entered("whole_that_reads_a_rate_unseen", _looks_at_rate, *KEPT, "opaque")


# -- gradients, seen and changed from outside


def _dropped_outside(live):
    """By a callback, which may look at them: they are None in the next step, too."""
    pair = Pair()

    def step(batch):
        left = sum(p.grad is not None for p in pair.other.parameters())
        value, metrics = pair.step(batch)
        return value, {**metrics, "left": left}

    def drop():
        for parameter in pair.other.parameters():
            parameter.grad = None

    return pair.subject(step, on_step=at(4, live, drop))


entered("whole_gradients_dropped_outside", _dropped_outside, *KEPT, "opaque")


def _sums(change):
    """A step that adds to the gradients, which a callback changes."""

    def make(live):
        pair = Pair()

        def step(batch):
            value = cross_entropy(pair.model, batch)
            value.backward()
            pair.first.step()
            return value

        return pair.subject(step, on_step=at(4, live, lambda: change(pair)))

    return make


def _forget_sums(pair):
    pair.first.zero_grad()


def _halve_sums(pair):
    for parameter in pair.model.parameters():
        parameter.grad.mul_(0.5)


entered("whole_sums_forgotten_outside", _sums(_forget_sums), *KEPT, "opaque")
entered("whole_sums_halved_outside", _sums(_halve_sums), *KEPT, "opaque")


def _collected(live):
    """A callback that keeps each step's gradients as they are."""
    pair, kept = Pair(), []
    subject = pair.subject(on_step=every(live, lambda step: kept.append(pair.model[0].weight.grad)))
    return Subject(subject.job, lambda: [*map(torch.clone, kept), *pair.gradients()])


entered("whole_gradients_collected", _collected, "opaque")


def _collected_by_evaluation(live):
    pair, kept = Pair(), []

    def evaluate(model):
        kept.append(pair.model[0].weight.grad)
        return 0.0

    subject = pair.subject(evaluate=evaluate if live else None, evaluate_every=2)
    return Subject(subject.job, lambda: [len(kept), *(g.clone() for g in kept if g is not None)])


entered("whole_gradients_collected_by_evaluations", _collected_by_evaluation, *KEPT, "opaque")


def _hooked(live):
    pair = Pair()

    def hook():
        pair.model[0].weight.register_hook(lambda gradient: gradient * 2)

    return pair.subject(on_step=at(4, live, hook))


entered("whole_hooked", _hooked, *KEPT, "opaque")


def _update_hooked(live):
    pair = Pair()

    def halve(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)

    change = at(4, live, lambda: pair.first.register_step_pre_hook(halve))
    return pair.subject(on_step=change)


entered("whole_update_hooked", _update_hooked, *KEPT, "opaque")


def _outside_all_modules(live):
    """A parameter that belongs to an optimizer alone."""
    pair, temperature = Pair(), torch.zeros((), requires_grad=True)
    pair.second = torch.optim.Adam([temperature], lr=0.1)

    def step(batch):
        pair.first.zero_grad()
        pair.second.zero_grad()
        value = cross_entropy(pair.model, batch) * temperature.exp() + temperature.square()
        value.backward()
        pair.first.step()
        pair.second.step()
        return value, {"temperature": temperature}

    change = at(4, live, lambda: temperature.detach().add_(1.0))
    return Subject(pair.subject(step, on_step=change).job, temperature.item)


entered("whole_temperature_outside_all_modules", _outside_all_modules, *KEPT)


def _shared_parameter(live):
    """Two optimizers of the same parameters."""
    pair = Pair()
    pair.second = sgd(pair.model, lr=0.01)

    def step(batch):
        pair.first.zero_grad()
        value = cross_entropy(pair.model, batch)
        value.backward()
        pair.first.step()
        pair.second.step()
        return value

    return pair.subject(step)


entered("whole_two_optimizers_of_one", _shared_parameter, "opaque", matters=False)


def _inferred(live):
    """A copy of the model that is made in the middle of the training."""
    pair, held = Pair(), {}

    def step(batch):
        value, _ = pair.step(batch)
        with torch.no_grad():
            told = held["copy"](batch[0]).mean() if held else value
        return value, {"told": told}

    change = at(4, live, lambda: held.update(copy=copy.deepcopy(pair.model).eval()))
    return pair.subject(step, on_step=change)


entered("whole_with_a_copy_later_on", _inferred, *KEPT, "opaque")


# -- gradients that the step's own Python has, too


@steady("whole_keeps_its_first_gradients", *KEPT, "opaque")
def _first(pair, batch):
    """They are read by every step, and stay what they were."""
    told = pair.step(batch)
    if not hasattr(pair, "kept"):
        pair.kept = [p.grad for p in pair.model.parameters()]
    return told[0], {**told[1], "kept": torch.stack([g.norm() for g in pair.kept]).sum()}


def _flat_gradients(live):
    """Gradients that are views of one piece of memory, which the step clears and reads as one."""
    pair = Pair()
    parameters = list(pair.model.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters))
    for parameter, part in zip(
        parameters, flat.split([p.numel() for p in parameters]), strict=True
    ):
        parameter.grad = part.view_as(parameter)

    def step(batch):
        flat.zero_()
        value = cross_entropy(pair.model, batch)
        value.backward()
        flat.mul_(1 / (1 + flat.norm()))
        pair.first.step()
        return value, {"norm": flat.norm()}

    return Subject(pair.subject(step).job, flat.clone)


entered("whole_flat_gradients", _flat_gradients, *KEPT, "opaque", matters=False)


def _kept_by_short(live):
    """Batches of one shape alone keep the gradients that they find, and those that they leave."""
    pair = Pair()
    pair.found, pair.left = [], []

    def step(batch):
        if len(batch[0]) == 3:
            pair.found.append([p.grad for p in pair.model.parameters()])
        told = pair.step(batch)
        if len(batch[0]) == 3:
            pair.left.append([p.grad for p in pair.model.parameters()])
        return told

    data = [*batches(4), *batches(1, 3)]
    subject = pair.subject(step, data=data, epochs=4)
    return Subject(
        subject.job,
        lambda: [g.clone() for kept in (pair.found, pair.left) for one in kept for g in one],
    )


entered("whole_gradients_kept_by_short_batches", _kept_by_short, *KEPT, "opaque", matters=False)


def _kept_and_summed(live):
    """The step adds to gradients that short batches have kept: they are the very same tensors."""
    pair = Pair()
    pair.kept = []

    def step(batch):
        if len(batch[0]) == 3:
            pair.first.zero_grad()
        value = cross_entropy(pair.model, batch)
        value.backward()
        if len(batch[0]) == 3:
            pair.kept = [p.grad for p in pair.model.parameters()]
        pair.first.step()
        return value, {"kept": sum([g.sum() for g in pair.kept], torch.zeros(()))}

    data = [*batches(1, 3), *batches(4)]
    return pair.subject(step, data=data, epochs=4)


entered("whole_gradients_kept_and_added_to", _kept_and_summed, *KEPT, "opaque", matters=False)


def _enclosed_group(live):
    """The step has a group of an optimizer, and not only the optimizer."""
    pair = Pair()
    group = pair.second.param_groups[0]

    def step(batch):
        value, told = pair.step(batch)
        with torch.no_grad():
            pair.other[0].weight.mul_(1 - group["lr"])
        return value, told

    return pair.subject(step, on_step=at(4, live, lambda: group.update(lr=0.3)))


entered("whole_with_a_group_of_its_own", _enclosed_group, *KEPT, "opaque")


# -- optimizers, modules and modes of other kinds


@changed("whole_betas_changed")
def _betas(pair):
    pair.first.param_groups[0].update(betas=(0.5, 0.6))


@changed("whole_group_added")
def _group(pair):
    spare = nn.Parameter(torch.ones(3))
    pair.model.spare = spare
    pair.first.add_param_group({"params": [spare], "lr": 0.5})
    pair.first.param_groups[0]["lr"] = 0.02


@changed("whole_state_cleared")
def _cleared_state(pair):
    for entries in pair.first.state.values():
        entries["exp_avg"].zero_()


@changed("whole_state_replaced")
def _replaced_state(pair):
    for entries in pair.first.state.values():
        entries["exp_avg"] = torch.zeros_like(entries["exp_avg"])


@changed("whole_state_loaded")
def _loaded_state(pair):
    state = copy.deepcopy(pair.first.state_dict())
    state["param_groups"][0]["lr"] = 0.1
    pair.first.load_state_dict(state)


@changed("whole_weights_exchanged")
def _exchanged_weights(pair):
    pair.model[0].weight.data = torch.full_like(pair.model[0].weight, 0.01)


def of_kind(name, optimizer, *expected, model=mlp):
    """Enters a pair with another optimizer, whose rate a callback changes."""

    def make(live):
        pair = Pair()
        pair.model = model()
        pair.first = optimizer(pair.model.parameters())

        def change():
            pair.first.param_groups[0]["lr"] = 0.1

        return pair.subject(on_step=at(4, live, change))

    entered(name, make, *(expected or KEPT))


class Rows(nn.Module):
    """An LSTM over the four rows of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.inner(x.view(-1, 4, 4))[0][:, -1])


def _normed():
    return nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


of_kind("whole_fused", lambda p: torch.optim.AdamW(p, lr=0.01, fused=True))
of_kind("whole_foreach", lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True))
of_kind("whole_rmsprop", lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True))
of_kind("whole_nesterov", lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True))
of_kind("whole_radam", lambda p: torch.optim.RAdam(p, lr=0.01), "opaque")
of_kind("whole_lstm", lambda p: torch.optim.Adam(p, lr=0.01), model=Rows)
of_kind("whole_batch_norm", lambda p: torch.optim.Adam(p, lr=0.01), model=_normed)


@steady("whole_under_autocast")
def _autocast(pair, batch):
    pair.first.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = cross_entropy(pair.model, batch) + cross_entropy(pair.model, batch)
    value.backward()
    pair.first.step()
    return value


@steady("whole_with_inference_mode")
def _inference(pair, batch):
    with torch.inference_mode():
        target = pair.other(batch[0])
    pair.first.zero_grad()
    value = F.mse_loss(pair.model(batch[0]), target.clone())
    value.backward()
    pair.first.step()
    return value


def _in_backward(live):
    """Optimizers that step in the middle of the backward pass."""
    pair = Pair()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in pair.model.parameters()}

    def update(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(update)

    def step(batch):
        value = cross_entropy(pair.model, batch)
        value.backward()
        return value

    made = wf.Job(
        "case",
        model=pair.model,
        optimizers=[*optimizers.values()],
        step=step,
        data=batches(),
        seed=5,
    )
    return made


entered("whole_updates_in_backward", _in_backward, *KEPT, "opaque", matters=False)


def _sparse(live):
    table = nn.Embedding(4, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())

    def step(batch):
        optimizer.zero_grad()
        value = table(batch[1]).square().mean()
        value.backward()
        optimizer.step()
        return value

    return wf.Job("case", model=table, optimizer=optimizer, step=step, data=batches(), seed=5)


entered("whole_sparse_gradients", _sparse, "opaque", matters=False)


@case("opaque")
def catches_that_a_norm_is_not_finite(live):
    """Clipping raises where a trace has no numbers to look at, and the step goes on without."""
    data = [(x * (float("inf") if live and n == 5 else 1), y) for n, (x, y) in enumerate(batches())]
    model = mlp()
    optimizer = sgd(model)

    def step(batch):
        value = cross_entropy(model, batch)
        value.backward()
        try:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
            optimizer.step()
        except RuntimeError:
            pass
        optimizer.zero_grad()
        return value

    return wf.Job("case", model=model, optimizers=[optimizer], step=step, data=data, seed=5)


@case("opaque", matters=False)
def catches_that_an_optimizer_is_given_a_closure(live):
    model = mlp()
    optimizer = sgd(model)

    def step(batch):
        value = cross_entropy(model, batch)
        value.backward()
        try:
            optimizer.step(lambda: value)
        except Exception:
            optimizer.step()
        optimizer.zero_grad()
        return value

    return wf.Job("case", model=model, optimizers=[optimizer], step=step, data=batches(), seed=5)
