"""Cases: attributes that the model reads are changed between two steps."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import types

import numpy as np
import torch

from tests.exactness.case import KEPT, Net, at, case, cross_entropy, every, job, mlp


def activation(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x)


@case(*KEPT)
def configuration_object(live):
    class Model(Net):
        def factor(self, x):
            return self.config.scale

    model = Model()
    model.config = types.SimpleNamespace(scale=1.0)
    return job(model, on_step=at(4, live, lambda: setattr(model.config, "scale", 2.0)))


@case(*KEPT)
def field_of_the_job(live):
    held = {}

    def loss(model, batch):
        return held["job"].weight * cross_entropy(model, batch)

    held["job"] = job(mlp(), loss, on_step=at(4, live, lambda: setattr(held["job"], "weight", 2.0)))
    return held["job"]


@case(*KEPT)
def kept_result_of_a_step(live):
    """An object that the engine has made."""
    kept = []

    def loss(model, batch):
        return cross_entropy(model, batch) * (kept[0].epoch + 1 if kept else 1.0)

    def on_step(result):
        if not kept:
            kept.append(dataclasses.replace(result))
        if live and result.step == 4:
            object.__setattr__(kept[0], "epoch", 5)

    return job(mlp(), loss, on_step=on_step)


@case(*KEPT)
def configuration_dataclass(live):
    @dataclasses.dataclass
    class Config:
        scale: float = 1.0

    class Model(Net):
        def factor(self, x):
            return self.config.scale

    model = Model()
    model.config = Config()

    def change():
        model.config = dataclasses.replace(model.config, scale=2.0)

    return job(model, on_step=at(4, live, change))


@case(*KEPT)
def nested_configuration(live):
    class Model(Net):
        def factor(self, x):
            return self.blocks[1]["scale"][0]

    model = Model()
    model.blocks = [{}, {"scale": [1.0]}]
    change = at(4, live, lambda: model.blocks[1]["scale"].__setitem__(0, 2.0))
    return job(model, on_step=change)


@case("opaque", *KEPT)
def tuple_attribute(live):
    class Model(Net):
        scales = (1.0,)

        def factor(self, x):
            return self.scales[-1]

    model = Model()
    return job(model, on_step=every(live, lambda step: setattr(model, "scales", (1.0, 1 / step))))


@case(*KEPT)
def set_attribute(live):
    class Model(Net):
        def factor(self, x):
            return 2.0 if "double" in self.flags else 1.0

    model = Model()
    model.flags = {"plain"}
    return job(model, on_step=at(4, live, lambda: model.flags.add("double")))


@case(*KEPT)
def deque_rotated(live):
    class Model(Net):
        def factor(self, x):
            return self.scales[0]

    model = Model()
    model.scales = collections.deque([1.0, 2.0, 0.5])
    return job(model, on_step=every(live, lambda step: model.scales.rotate()))


@case(*KEPT)
def numpy_scalar(live):
    class Model(Net):
        def factor(self, x):
            return float(self.scale)

    model = Model()
    model.scale = np.float32(1.0)
    return job(model, on_step=at(4, live, lambda: setattr(model, "scale", np.float32(2.0))))


@case(*KEPT, "opaque")
def numpy_array_changed_in_place(live):
    class Model(Net):
        def factor(self, x):
            return float(self.scales[0])

    model = Model()
    model.scales = np.ones(2)
    return job(model, on_step=at(4, live, lambda: model.scales.fill(2.0)))


@case(*KEPT)
def mode_by_enumeration(live):
    class Mode(enum.Enum):
        PLAIN = 1
        DOUBLE = 2

    class Model(Net):
        mode = Mode.PLAIN

        def factor(self, x):
            return 2.0 if self.mode is Mode.DOUBLE else 1.0

    model = Model()
    return job(model, on_step=at(4, live, lambda: setattr(model, "mode", Mode.DOUBLE)))


@case(*KEPT)
def class_attribute(live):
    class Model(Net):
        scale = 1.0

        def factor(self, x):
            return self.scale

    return job(Model(), on_step=at(4, live, lambda: setattr(Model, "scale", 2.0)))


@case(*KEPT)
def attribute_of_a_base_class(live):
    class Base(Net):
        scale = 1.0

    class Model(Base):
        def factor(self, x):
            return type(self).scale

    return job(Model(), on_step=at(4, live, lambda: setattr(Base, "scale", 2.0)))


@case(*KEPT)
def property_over_a_dictionary(live):
    class Model(Net):
        registry: dict[str, float] = {"scale": 1.0}  # noqa: RUF012  (shared on purpose)

        @property
        def scale(self):
            return self.registry["scale"]

        def factor(self, x):
            return self.scale

    return job(Model(), on_step=at(4, live, lambda: Model.registry.update(scale=2.0)))


@case(*KEPT)
def forward_patched_on_the_instance(live):
    model = mlp()
    forward = model.forward
    change = at(4, live, lambda: setattr(model, "forward", lambda x: forward(x) * 2))
    return job(model, on_step=change)


@case(*KEPT)
def forward_patched_on_the_class(live):
    class Model(Net):
        pass

    def forward(self, x):
        return self.two(torch.sigmoid(self.one(x)))

    return job(Model(), on_step=at(4, live, lambda: setattr(Model, "forward", forward)))


@case(*KEPT)
def activation_function_replaced(live):
    class Model(Net):
        def forward(self, x):
            return self.two(self.activation(self.one(x)))

    model = Model()
    model.activation = torch.tanh
    return job(model, on_step=at(4, live, lambda: setattr(model, "activation", torch.sigmoid)))


@case("opaque", *KEPT)
def global_helper_replaced(live):
    globals()["activation"] = torch.tanh

    class Model(Net):
        def forward(self, x):
            return self.two(activation(self.one(x)))

    change = functools.partial(globals().update, activation=torch.sigmoid)
    return job(Model(), on_step=at(4, live, change))


@case(*KEPT)
def tensor_attribute_replaced(live):
    class Model(Net):
        def factor(self, x):
            return self.scale

    model = Model()
    model.scale = torch.ones(4)
    return job(model, on_step=at(4, live, lambda: setattr(model, "scale", torch.full((4,), 2.0))))


@case(*KEPT)
def tensor_attribute_changed_in_place(live):
    class Model(Net):
        def factor(self, x):
            return self.scale

    model = Model()
    model.scale = torch.ones(4)
    return job(model, on_step=at(4, live, lambda: model.scale.mul_(2)))


@case(*KEPT)
def tensor_in_a_dictionary_replaced(live):
    class Model(Net):
        def factor(self, x):
            return self.tables["scale"]

    model = Model()
    model.tables = {"scale": torch.ones(4)}
    change = at(4, live, lambda: model.tables.update(scale=torch.full((4,), 2.0)))
    return job(model, on_step=change)


@case(*KEPT)
def autocast_toggled_by_a_flag(live):
    class Model(Net):
        low = False

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16, enabled=self.low):
                return super().forward(x).float()

    model = Model()
    return job(model, on_step=at(4, live, lambda: setattr(model, "low", True)))
