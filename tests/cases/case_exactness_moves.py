"""Cases: the step itself moves what it reads, so that no two steps are the same."""

from __future__ import annotations

import collections
import contextvars
import functools
import itertools
import threading
import types
import weakref

import numpy as np
import torch
import torch.nn.functional as F
from case_exactness import Net, Subject, at, batches, case, cross_entropy, every, job, mlp, sgd

SEEN: list[int] = []
COUNTED = 0
DEPTH: contextvars.ContextVar[int] = contextvars.ContextVar("DEPTH", default=0)
HOLDER = types.ModuleType("holder_of_the_step")


def weighted(weight, live):
    """A loss with a weight that is asked for in every step, or was once and for all."""
    ask = weight if live else functools.partial(float, weight())
    return lambda model, batch: cross_entropy(model, batch) * ask()


class Counting(Net):
    """Divides by the number of its calls, as its subclasses count them; or by one."""

    live = True

    def count(self):
        raise NotImplementedError

    def factor(self, x):
        return 1 / (self.count() if self.live else 1)


def counting(kind, live, **options):
    model = kind()
    model.live = live
    return job(model, **options)


# -- counters


@case("opaque")
def counter_in_a_global_list(live):
    SEEN.clear()

    class Model(Counting):
        def count(self):
            SEEN.append(1)
            return len(SEEN)

    return counting(Model, live)


@case("opaque")
def counter_in_a_global_number(live):
    global COUNTED
    COUNTED = 0

    class Model(Counting):
        def count(self):
            global COUNTED
            COUNTED += 1
            return COUNTED

    return counting(Model, live)


@case("opaque")
def counter_in_a_closure(live):
    steps = 0

    def loss(model, batch):
        nonlocal steps
        steps += 1
        return cross_entropy(model, batch) / (steps if live else 1)

    return job(mlp(), loss)


@case("opaque")
def counter_as_an_attribute(live):
    class Model(Counting):
        calls = 0

        def count(self):
            self.calls += 1
            return self.calls

    return counting(Model, live)


@case("opaque")
def counter_in_a_dictionary(live):
    class Model(Counting):
        def count(self):
            self.calls["forward"] += 1
            return self.calls["forward"]

    Model.calls = collections.Counter()
    return counting(Model, live)


@case("opaque")
def counter_in_a_configuration(live):
    config = types.SimpleNamespace(calls=0)

    class Model(Counting):
        def count(self):
            config.calls += 1
            return config.calls

    return counting(Model, live)


@case("opaque")
def counter_of_the_class(live):
    class Model(Counting):
        calls = 0

        def count(self):
            type(self).calls += 1
            return self.calls

    return counting(Model, live)


@case("opaque")
def counter_of_a_metaclass(live):
    class Meta(type):
        calls = 0

    class Key(metaclass=Meta):
        pass

    class Model(Counting):
        def count(self):
            Meta.calls += 1
            return Key.calls

    return counting(Model, live)


@case("opaque")
def counter_of_a_function(live):
    def weight():
        weight.calls += 1
        return 1 / (weight.calls if live else 1)

    weight.calls = 0
    return job(mlp(), lambda m, b: cross_entropy(m, b) * weight())


@case("opaque")
def counter_in_a_default_argument(live):
    def loss(model, batch, state=[0]):  # noqa: B006  (the point)
        state[0] += 1
        return cross_entropy(model, batch) / (state[0] if live else 1)

    return job(mlp(), loss)


@case("opaque")
def counter_in_a_module(live):
    HOLDER.calls = 0

    class Model(Counting):
        def count(self):
            HOLDER.calls += 1
            return HOLDER.calls

    return counting(Model, live)


@case("opaque")
def counter_in_a_property(live):
    class Model(Counting):
        calls = 0

        @property
        def next(self):
            self.__dict__["calls"] = self.calls + 1
            return self.calls

        def count(self):
            return self.next

    return counting(Model, live)


@case("opaque")
def counter_in_a_descriptor(live):
    class Next:
        calls = 0

        def __get__(self, instance, owner):
            self.calls += 1
            return self.calls

    class Model(Counting):
        next = Next()

        def count(self):
            return self.next

    return counting(Model, live)


@case("opaque")
def counter_beside_a_weak_reference(live):
    class Key:
        pass

    key = Key()
    calls = weakref.WeakKeyDictionary({key: 0})

    class Model(Counting):
        def count(self):
            calls[key] += 1
            return calls[key]

    return counting(Model, live)


@case("opaque")
def counter_of_the_thread(live):
    local = threading.local()

    class Model(Counting):
        def count(self):
            local.calls = getattr(local, "calls", 0) + 1
            return local.calls

    return counting(Model, live)


@case("opaque")
def counter_in_a_context_variable(live):
    DEPTH.set(0)

    class Model(Counting):
        def count(self):
            DEPTH.set(DEPTH.get() + 1)
            return DEPTH.get()

    return counting(Model, live)


@case("opaque")
def counter_in_an_array(live):
    class Model(Counting):
        def count(self):
            self.calls += 1
            return float(self.calls[0])

    Model.calls = np.zeros(1)
    return counting(Model, live)


@case("opaque")
def itertools_count(live):
    return job(mlp(), weighted(functools.partial(next, itertools.count(1)), live))


@case("opaque")
def itertools_cycle(live):
    return job(mlp(), weighted(functools.partial(next, itertools.cycle([1.0, 0.5, 2.0])), live))


@case("opaque")
def deque_rotated_by_the_step(live):
    ring = collections.deque([1.0, 0.5, 2.0])

    def weight():
        ring.rotate()
        return ring[0]

    return job(mlp(), weighted(weight, live))


@case("opaque")
def list_popped_by_the_step(live):
    return job(mlp(), weighted([0.1 * n for n in range(1, 13)].pop, live))


@case("opaque")
def generator_resumed(live):
    def schedule():
        weight = 1.0
        while True:
            yield weight
            weight *= 0.8

    return job(mlp(), weighted(functools.partial(next, schedule()), live))


@case("opaque")
def generator_sent_to(live):
    def average():
        mean, step = 1.0, 0
        while True:
            step = yield mean
            mean = 0.9 * mean + 0.1 * step

    made = average()
    next(made)
    return job(mlp(), weighted(lambda: made.send(3.0), live))


@case(*("captured", "recaptured", "opaque"), matters=False)
def cache_that_fills_once(live):
    @functools.lru_cache
    def weight(width):
        return 1 / width**0.5

    return job(mlp(), lambda m, b: cross_entropy(m, b) * weight(b[0].shape[1]))


@case("opaque")
def cache_cleared_between(live):
    calls = itertools.count(1)

    @functools.cache
    def weight():
        return 1 / next(calls)

    loss = lambda m, b: cross_entropy(m, b) * weight()  # noqa: E731
    return job(mlp(), loss, on_step=every(live, lambda step: weight.cache_clear()))


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
def warm_up_in_the_model(live):
    class Model(Counting):
        calls = 0

        def count(self):
            self.calls += self.training
            return max(1.0, 5 - self.calls)

    return counting(Model, live)


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
