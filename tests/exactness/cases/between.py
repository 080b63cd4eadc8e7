"""Cases: what the step reads is changed between two steps, mostly by a callback."""

from __future__ import annotations

import contextvars
import functools
import math
import os
import types
from collections import OrderedDict

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.exactness.case import KEPT, Net, at, batches, case, cross_entropy, every, job, mlp, sgd

WEIGHT = 1.0
SETTINGS: dict[str, float] = {}
POWERS: list[float] = []
SCALE: contextvars.ContextVar[float] = contextvars.ContextVar("SCALE", default=1.0)
MODULE = types.ModuleType("settings_of_the_step")


# -- the loss function's world


@case("opaque", *KEPT)
def closure_variable(live):
    weight = 1.0

    def loss(model, batch):
        return cross_entropy(model, batch) * weight

    def change(step):
        nonlocal weight
        weight = 1 / step

    return job(mlp(), loss, on_step=every(live, change))


@case(*KEPT)
def global_number(live):
    global WEIGHT
    WEIGHT = 1.0

    def change():
        global WEIGHT
        WEIGHT = 2.0

    return job(mlp(), lambda m, b: cross_entropy(m, b) * WEIGHT, on_step=at(4, live, change))


@case(*KEPT)
def global_dictionary(live):
    SETTINGS.update(weight=1.0)
    change = functools.partial(SETTINGS.update, weight=0.5)
    loss = lambda m, b: cross_entropy(m, b) * SETTINGS["weight"]  # noqa: E731
    return job(mlp(), loss, on_step=at(4, live, change))


@case("opaque", *KEPT)
def global_list(live):
    POWERS[:] = [1.0]
    loss = lambda m, b: cross_entropy(m, b) * sum(POWERS)  # noqa: E731
    return job(mlp(), loss, on_step=every(live, lambda step: POWERS.append(1 / step)))


@case("opaque", *KEPT)
def label_smoothing(live):
    criterion = nn.CrossEntropyLoss()
    change = every(live, lambda step: setattr(criterion, "label_smoothing", 0.04 * step))
    return job(mlp(), lambda m, b: criterion(m(b[0]), b[1]), on_step=change)


@case(*KEPT)
def reduction_of_a_criterion(live):
    criterion = nn.CrossEntropyLoss()
    change = at(3, live, lambda: setattr(criterion, "reduction", "sum"))
    model = mlp()
    loss = lambda m, b: criterion(m(b[0]), b[1])  # noqa: E731
    return job(model, loss, optimizer=sgd(model, lr=0.01), on_step=change)


@case(*KEPT)
def keyword_of_a_partial(live):
    def weighted(model, batch, weight):
        return cross_entropy(model, batch) * weight

    loss = functools.partial(weighted, weight=1.0)
    return job(mlp(), loss, on_step=at(4, live, lambda: loss.keywords.update(weight=3.0)))


@case(*KEPT)
def attribute_behind_a_bound_method(live):
    class Trainer:
        weight = 1.0

        def loss(self, model, batch):
            return cross_entropy(model, batch) * self.weight

    trainer = Trainer()
    change = at(4, live, lambda: setattr(trainer, "weight", 3.0))
    return job(mlp(), trainer.loss, on_step=change)


@case("opaque", *KEPT)
def attribute_of_a_callable_object(live):
    class Loss:
        def __init__(self):
            self.weight = 1.0

        def __call__(self, model, batch):
            return cross_entropy(model, batch) * self.weight

    loss = Loss()
    return job(mlp(), loss, on_step=every(live, lambda step: setattr(loss, "weight", 1 / step)))


@case(*KEPT)
def attribute_of_a_function(live):
    def loss(model, batch):
        return cross_entropy(model, batch) * loss.weight

    loss.weight = 1.0
    return job(mlp(), loss, on_step=at(4, live, lambda: setattr(loss, "weight", 3.0)))


@case(*KEPT)
def defaults_of_a_function(live):
    def loss(model, batch, weight=1.0):
        return cross_entropy(model, batch) * weight

    return job(mlp(), loss, on_step=at(4, live, lambda: setattr(loss, "__defaults__", (3.0,))))


@case(*KEPT)
def code_of_a_function(live):
    def weight():
        return 1.0

    def other():
        return 3.0

    def change():
        weight.__code__ = other.__code__

    return job(mlp(), lambda m, b: cross_entropy(m, b) * weight(), on_step=at(4, live, change))


@case(*KEPT)
def weight_tensor_changed_in_place(live):
    weight = torch.ones(4)
    loss = lambda m, b: F.cross_entropy(m(b[0]), b[1], weight)  # noqa: E731
    return job(mlp(), loss, on_step=at(4, live, lambda: weight[0].fill_(3.0)))


@case(*KEPT)
def class_weights_replaced(live):
    criterion = nn.CrossEntropyLoss(torch.ones(4))
    change = at(4, live, lambda: setattr(criterion, "weight", torch.tensor([1.0, 2, 3, 4])))
    return job(mlp(), lambda m, b: criterion(m(b[0]), b[1]), on_step=change)


@case(*KEPT)
def attribute_with_slots(live):
    class Options:
        __slots__ = ("weight",)

    options = Options()
    options.weight = 1.0
    loss = lambda m, b: cross_entropy(m, b) * options.weight  # noqa: E731
    return job(mlp(), loss, on_step=at(4, live, lambda: setattr(options, "weight", 3.0)))


@case(*KEPT)
def attribute_of_an_ordered_dictionary(live):
    options = OrderedDict()
    options.weight = 1.0
    loss = lambda m, b: cross_entropy(m, b) * options.weight  # noqa: E731
    return job(mlp(), loss, on_step=at(4, live, lambda: setattr(options, "weight", 3.0)))


class ComparedByName(type):
    """Of classes that are made anew each time, as those of a notebook's cell."""

    def __eq__(cls, other):
        return isinstance(other, ComparedByName) and cls.__name__ == other.__name__

    def __hash__(cls):
        return hash(cls.__name__)


def made_with_slot(slot):
    made = ComparedByName("Rate", (), {"__slots__": (slot,)})()
    setattr(made, slot, 1.0)
    return made


@case(*KEPT)
def slot_of_a_class_that_says_it_is_one_met_before(live):
    former, rate = made_with_slot("value"), made_with_slot("weight")

    def loss(model, batch):
        return cross_entropy(model, batch) * former.value * rate.weight

    return job(mlp(), loss, on_step=at(4, live, lambda: setattr(rate, "weight", 2.0)))


@case(*KEPT)
def variable_of_a_module(live):
    MODULE.weight = 1.0
    loss = lambda m, b: cross_entropy(m, b) * MODULE.weight  # noqa: E731
    return job(mlp(), loss, on_step=at(4, live, lambda: setattr(MODULE, "weight", 3.0)))


@case(*KEPT, "opaque")
def context_variable_set_between(live):
    SCALE.set(1.0)
    loss = lambda m, b: cross_entropy(m, b) * SCALE.get()  # noqa: E731
    return job(mlp(), loss, on_step=at(4, live, lambda: SCALE.set(3.0)))


@case("captured", "recaptured", "opaque")
def environment_variable(live):
    os.environ["WEIGHT_OF_THE_STEP"] = "1"
    loss = lambda m, b: cross_entropy(m, b) * float(os.environ["WEIGHT_OF_THE_STEP"])  # noqa: E731
    change = functools.partial(os.environ.update, WEIGHT_OF_THE_STEP="3")
    return job(mlp(), loss, on_step=at(4, live, change))


# -- by what else runs between the steps


@case("opaque", *KEPT)
def dropout_annealed_by_a_scheduler(live):
    model = mlp(0.1)

    class Annealing:
        step_count = 0

        def step(self):
            self.step_count += 1
            if live:
                model[2].p = 0.05 * self.step_count

    return job(model, scheduler=Annealing())


@case("opaque", *KEPT)
def temperature_moved_by_the_data(live):
    class Model(Net):
        temperature = 1.0

        def factor(self, x):
            return 1 / self.temperature

    model = Model()

    def rows():
        for step, batch in enumerate(batches()):
            if live:
                model.temperature = 1 + 0.1 * step
            yield batch

    return job(model, data=rows())


@case("opaque", *KEPT)
def temperature_moved_by_a_hook_of_the_optimizer(live):
    class Model(Net):
        temperature = 1.0

        def factor(self, x):
            return 1 / self.temperature

    model = Model()
    optimizer = sgd(model)

    def hook(*_):
        if live:
            model.temperature += 0.1

    optimizer.register_step_post_hook(hook)
    return job(model, optimizer=optimizer)


def told_by(number):
    """A factor that tells numbers apart which are equal."""
    return 2.0 if type(number) is bool or math.copysign(1.0, number) < 0 else 1.0


@case(*KEPT)
def context_variable_becomes_its_equal(live):
    SCALE.set(0.0)
    loss = lambda m, b: cross_entropy(m, b) * told_by(SCALE.get())  # noqa: E731
    return job(mlp(), loss, on_step=at(4, live, lambda: SCALE.set(-0.0)))


@case("opaque", *KEPT)
def item_of_an_array_of_objects_becomes_its_equal(live):
    numbers = np.array([1, None], dtype=object)
    loss = lambda m, b: cross_entropy(m, b) * told_by(numbers[0])  # noqa: E731
    return job(mlp(), loss, on_step=at(4, live, lambda: numbers.__setitem__(0, True)))


@case("opaque", *KEPT)
def variable_of_a_generator_becomes_its_equal(live):
    def numbers():
        number = 1
        while True:
            asked = yield number
            number = number if asked is None else asked

    generator = numbers()
    next(generator)
    loss = lambda m, b: cross_entropy(m, b) * told_by(generator.gi_frame.f_locals["number"])  # noqa: E731
    return job(mlp(), loss, on_step=at(4, live, lambda: generator.send(True)))


@case(*KEPT)
def loss_of_the_job_replaced(live):
    made = job(mlp())
    change = at(4, live, lambda: setattr(made, "loss", lambda m, b: m(b[0]).square().mean()))
    made.on_step = change
    return made


@case(*KEPT)
def clipping_of_the_job_replaced(live):
    made = job(mlp(), clip_grad_norm=10.0)
    made.on_step = at(4, live, lambda: setattr(made, "clip_grad_norm", 0.01))
    return made


@case("opaque", *KEPT)
def optimizer_of_the_job_replaced(live):
    model = mlp()
    made = job(model)
    other = torch.optim.Adam(model.parameters(), lr=0.01)
    made.on_step = at(4, live, lambda: setattr(made, "optimizer", other))
    return made


@case(*KEPT)
def scheduler_of_the_job_replaced(live):
    model = mlp()
    made = job(model)
    other = torch.optim.lr_scheduler.ExponentialLR(made.optimizer, 0.7)
    made.on_step = at(4, live, lambda: setattr(made, "scheduler", other))
    return made


@case(*KEPT)
def callback_replaces_itself(live):
    class Model(Net):
        scale = 1.0

        def factor(self, x):
            return self.scale

    model = Model()
    made = job(model)

    def second(result):
        model.scale = 2.0

    made.on_step = at(4, live, lambda: setattr(made, "on_step", second))
    return made


# -- callbacks that look at gradients, or step an optimizer


@case("opaque")
def own_optimizer_stepped_again(live):
    model = mlp()
    optimizer = sgd(model)
    return job(model, optimizer=optimizer, on_step=every(live, lambda step: optimizer.step()))


@case("opaque")
def own_optimizer_stepped_for_another_batch(live):
    model = mlp()
    optimizer = sgd(model)

    def change(step):
        cross_entropy(model, batches()[-step]).backward()
        optimizer.step()

    return job(model, optimizer=optimizer, on_step=every(live, change))


@case("opaque")
def new_optimizer_in_the_callback(live):
    model = mlp()
    change = at(4, live, lambda: torch.optim.SGD(model.parameters(), lr=0.1).step())
    return job(model, on_step=change)


@case("opaque")
def gradient_read_by_a_text_of_a_tuple(live):
    model = mlp()
    optimizer = sgd(model)

    def change(step):
        norms = [getattr(model[0].weight, name).norm().item() for name in ("data", "grad")]
        optimizer.param_groups[0]["lr"] = 0.1 / sum(norms)

    return job(model, optimizer=optimizer, on_step=every(live, change))


@case(*KEPT)
def rate_set_and_scheduler_stepped_by_a_trainer(live):
    model = mlp()

    class Trainer:
        def __init__(self):
            self.optimizer = sgd(model)
            self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.8)

        def follow(self, step):
            self.schedule.step()
            self.optimizer.param_groups[0]["weight_decay"] = 0.01 * step

    trainer = Trainer()
    return job(model, optimizer=trainer.optimizer, on_step=every(live, trainer.follow))
