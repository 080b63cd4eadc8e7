"""Cases: the step moves what it reads by hooks and schedules, or remembers what went by."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F

from tests.exactness.case import (
    Net,
    Subject,
    at,
    batches,
    case,
    cross_entropy,
    every,
    job,
    mlp,
    sgd,
)

# -- hooks and custom functions


def _counter(live):
    calls = itertools.count(1)
    return (lambda: next(calls)) if live else (lambda: 1)


@case("opaque")
def counter_in_a_forward_hook(live):
    model, count = mlp(), _counter(live)
    model[0].register_forward_hook(lambda module, inputs, out: out / count())
    return job(model)


@case("opaque")
def counter_in_a_forward_pre_hook(live):
    model, count = mlp(), _counter(live)
    model[2].register_forward_pre_hook(lambda module, inputs: (inputs[0] / count(),))
    return job(model)


@case("opaque")
def counter_in_a_backward_hook(live):
    model, count = mlp(), _counter(live)
    model[1].register_full_backward_hook(lambda module, into, out: (into[0] / count(),))
    return job(model)


@case("opaque")
def counter_in_a_tensor_hook(live):
    model, count = mlp(), _counter(live)
    model[0].weight.register_hook(lambda gradient: gradient / count())
    return job(model)


@case("opaque")
def counter_in_a_hook_of_an_activation(live):
    count = _counter(live)

    class Model(Net):
        def forward(self, x):
            hidden = self.one(x)
            hidden.register_hook(lambda gradient: gradient / count())
            return self.two(hidden)

    return job(Model())


def _custom(forward_counts, live):
    count = _counter(live)

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x / count() if forward_counts else x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient if forward_counts else gradient / count()

    class Model(Net):
        def forward(self, x):
            return self.two(Scale.apply(self.one(x)))

    return job(Model())


@case("opaque")
def counter_in_a_custom_forward(live):
    return _custom(True, live)


@case("opaque")
def counter_in_a_custom_backward(live):
    return _custom(False, live)


# -- schedules and what the step remembers


@case("opaque")
def moving_average_of_the_loss(live):
    class Loss:
        mean = 1.0

        def __call__(self, model, batch):
            loss = cross_entropy(model, batch)
            if live:
                self.mean = 0.9 * self.mean + 0.1 * loss.item()
            return loss / self.mean

    return job(mlp(), Loss())


@case("opaque")
def baseline_kept_as_a_tensor(live):
    class Loss:
        def __init__(self):
            self.mean = torch.ones(())

        def __call__(self, model, batch):
            loss = cross_entropy(model, batch)
            if live:
                self.mean = 0.9 * self.mean + 0.1 * loss.detach()
            return loss / self.mean

    return job(mlp(), Loss())


@case("opaque")
def hidden_state_between_steps(live):
    class Model(Net):
        hidden = None

        def forward(self, x):
            hidden = torch.tanh(self.one(x))
            if self.hidden is not None and live:
                hidden = hidden + self.hidden
            self.hidden = hidden.detach()
            return self.two(hidden)

    return job(Model())


@case("captured")
def moving_average_in_a_buffer(live):
    class Model(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(32))

        def forward(self, x):
            hidden = torch.tanh(self.one(x))
            if live:
                self.mean.lerp_(hidden.detach().mean(0), 0.1)
            return self.two(hidden - self.mean)

    return job(Model())


@case("opaque")
def queue_with_a_python_pointer(live):
    class Model(Net):
        pointer = 0

        def __init__(self):
            super().__init__()
            self.register_buffer("queue", torch.zeros(4, 32))

        def forward(self, x):
            hidden = torch.tanh(self.one(x))
            with torch.no_grad():
                self.queue[self.pointer] = hidden.mean(0)
            if live:
                self.pointer = (self.pointer + 1) % 4
            return self.two(hidden - self.queue.mean(0))

    return job(Model())


@case("opaque", matters=False)
def losses_kept_by_the_loss(live):
    kept = []

    def loss(model, batch):
        value = cross_entropy(model, batch)
        kept.append(value.detach())
        return value

    return Subject(job(mlp(), loss), lambda: kept)


@case("opaque", matters=False)
def numbers_kept_by_the_loss(live):
    kept = []

    def loss(model, batch):
        value = cross_entropy(model, batch)
        kept.append(value.item())
        return value

    return Subject(job(mlp(), loss), lambda: kept)


@case("opaque", matters=False)
def activations_kept_by_a_hook(live):
    model, kept = mlp(), {}
    model[1].register_forward_hook(lambda module, inputs, out: kept.update(out=out.detach()))
    means = []
    made = job(model, on_step=every(True, lambda step: means.append(kept["out"].mean().item())))
    return Subject(made, lambda: means)


@case("opaque")
def replay_kept_by_the_loss(live):
    kept = []

    def loss(model, batch):
        kept.append(batch)
        old = kept[len(kept) // 2] if live else batch
        return cross_entropy(model, batch) + cross_entropy(model, old)

    return job(mlp(), loss)


@case("opaque")
def batch_changed_in_place(live):
    def loss(model, batch):
        if live:
            batch[0].mul_(0.9)
        return cross_entropy(model, batch)

    return job(mlp(), loss, data=batches(3), epochs=4)


@case("opaque")
def weights_clamped_by_the_loss(live):
    def loss(model, batch):
        if live:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.data = parameter.data.clamp(-0.2, 0.2)
        return cross_entropy(model, batch)

    return job(mlp(), loss)


@case("opaque")
def loss_that_trains_a_critic(live):
    critic = torch.nn.Linear(4, 1)
    optimizer = sgd(critic)

    def loss(model, batch):
        out = model(batch[0])
        if live:
            optimizer.zero_grad()
            (-critic(out.detach()).mean()).backward()
            optimizer.step()
        return F.cross_entropy(out, batch[1]) - 0.1 * critic(out).mean()

    return Subject(job(mlp(), loss), critic.state_dict)


@case("opaque")
def counter_reset_by_the_callback(live):
    state = {"inner": 0}

    def loss(model, batch):
        state["inner"] += 1
        return cross_entropy(model, batch) / (state["inner"] if live else 1)

    return job(mlp(), loss, on_step=at(5, True, lambda: state.update(inner=0)))
