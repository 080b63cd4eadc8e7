"""Cases: the step counts, and reads what it has counted."""

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

from tests.exactness.case import Net, at, batches, case, cross_entropy, every, job, mlp

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
def warm_up_in_the_model(live):
    class Model(Counting):
        calls = 0

        def count(self):
            self.calls += self.training
            return max(1.0, 5 - self.calls)

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
def array_that_grows(live):
    held = np.zeros(1)

    def weight():
        held.resize(len(held) + 1, refcheck=False)
        return len(held)

    return job(mlp(), weighted(weight, live))


@case("opaque")
def array_of_objects_that_shrinks(live):
    held = np.array([None] * 40)

    def weight():
        held.resize(len(held) - 1, refcheck=False)
        return len(held) / 40

    return job(mlp(), weighted(weight, live))


@case("opaque")
def array_whose_type_alternates(live):
    held = np.ones(4)

    def weight():
        held.dtype = np.float32 if held.dtype == np.float64 else np.float64
        return len(held)

    return job(mlp(), weighted(weight, live))


@case("opaque")
def memory_exchanged_by_the_step(live):
    held = torch.zeros(1)

    def weight():
        held.set_(torch.zeros(held.numel() + 1))
        return held.numel()

    return job(mlp(), weighted(weight, live))


@case("opaque")
def hits_of_a_cache(live):
    @functools.lru_cache
    def remembered(number):
        return number

    def weight():
        remembered(1)
        return 1 + remembered.cache_info().hits

    return job(mlp(), weighted(weight, live))


@case("opaque")
def bases_of_a_class_alternate(live):
    class One:
        scale = 1.0

    class Two:
        scale = 2.0

    class Scaled(One):
        pass

    def weight():
        Scaled.__bases__ = (Two,) if Scaled.__bases__ == (One,) else (One,)
        return Scaled.scale

    return job(mlp(), weighted(weight, live))


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


def forgetting(live, then):
    """A scale is remembered; a callback changes it, clears the cache and calls `then` with it."""
    state = {"scale": 1.0}

    @functools.cache
    def scale():
        return state["scale"]

    def change():
        state["scale"] = 1.5
        scale.cache_clear()
        then(scale)

    return job(mlp(), lambda m, b: cross_entropy(m, b) * scale(), on_step=at(6, live, change))


@case("captured", "recaptured", "opaque")
def remembered_result_of_what_has_changed(live):
    """Between two clearings the function does not run: only its cache tells what it returned."""
    return forgetting(live, then=lambda scale: None)


@case("captured", "recaptured", "opaque")
def remembered_result_replaced_by_the_callback(live):
    return forgetting(live, then=lambda scale: scale())


@case("captured", "recaptured", "opaque")
def remembered_list_changed_by_the_callback(live):
    @functools.cache
    def scales():
        return [1.0]

    def change():
        scales()[0] = 1.5

    return job(mlp(), lambda m, b: cross_entropy(m, b) * scales()[0], on_step=at(6, live, change))


@case("captured", "recaptured", "opaque")
def remembered_object_made_anew_where_the_former_was(live):
    state = {"scale": 1.0}

    @functools.lru_cache(maxsize=2)
    def settings(kind):
        return types.SimpleNamespace(kind=kind, scale=state["scale"])

    def change():
        state["scale"] = 1.5
        settings.cache_clear()
        settings("loss")

    loss = lambda m, b: cross_entropy(m, b) * settings("loss").scale  # noqa: E731
    return job(mlp(), loss, on_step=at(6, live, change))


@case("captured", "recaptured", "opaque")
def remembered_results_of_a_method(live):
    class Scales:
        base = 1.0

        @functools.cache  # noqa: B019
        def of(self, kind):
            return {kind: self.base}

    scales = Scales()

    def change():
        scales.of("loss")["loss"] = 1.5

    loss = lambda m, b: cross_entropy(m, b) * scales.of("loss")["loss"]  # noqa: E731
    return job(mlp(), loss, on_step=at(6, live, change))


@case("opaque", matters=False)
def cache_that_fills_with_each_shape(live):
    """A trace would leave its own stand-in for a tensor in the user's cache."""

    @functools.cache
    def mask(width):
        return torch.ones(width)

    data = [batches(1, size)[0] for size in range(1, 11)]
    return job(mlp(), lambda m, b: (m(b[0]).mean(1) * mask(len(b[0]))).sum(), data=data)
