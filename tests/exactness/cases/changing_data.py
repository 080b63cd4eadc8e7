"""Cases: the data's own Python changes what the step reads, each time before a batch is made.

The loop fetches a batch after the step before it, so the change is that batch's; a batch that is
fetched ahead would bring it to the steps before.
"""

from __future__ import annotations

import os
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, TensorDataset

from tests.exactness.case import KEPT, batches, case, cross_entropy, job, mlp, sgd

_STEPS, _ROWS = 24, 8
#: Steps with other values than the rest.
_OTHERS = (3, 4, 17)

Act = Callable[[int], None]


def _rows():
    return [torch.cat(parts) for parts in zip(*batches(_STEPS), strict=True)]


class _Acting(Dataset):
    """Acts before the first row of each batch."""

    def __init__(self, act):
        self.rows, self.act = TensorDataset(*_rows()), act

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        if index % _ROWS == 0:
            self.act(index // _ROWS)
        return self.rows[index]


class _Indices:
    """The indices of a subset."""

    def __init__(self, act):
        self.act = act

    def __len__(self):
        return _STEPS * _ROWS

    def __getitem__(self, index):
        if index % _ROWS == 0:
            self.act(index // _ROWS)
        return index


class _Order(Sampler):
    def __init__(self, act, whole):
        self.act, self.whole = act, whole

    def __len__(self):
        return _STEPS if self.whole else _STEPS * _ROWS

    def __iter__(self):
        for number in range(_STEPS):
            self.act(number)
            rows = range(number * _ROWS, (number + 1) * _ROWS)
            yield from [[*rows]] if self.whole else rows


#: Loaders that act before each batch.
LOADERS: dict[str, Callable[[Act], Any]] = {
    "dataset": lambda act: DataLoader(_Acting(act), _ROWS),
    "subset": lambda act: DataLoader(Subset(TensorDataset(*_rows()), _Indices(act)), _ROWS),
    "sampler": lambda act: DataLoader(TensorDataset(*_rows()), _ROWS, sampler=_Order(act, False)),
    "batch_sampler": lambda act: DataLoader(
        TensorDataset(*_rows()), batch_sampler=_Order(act, True)
    ),
}

# -- what they change, each known to the loss by a way of its own

weight = 1.0
held = {"weight": 1.0}
listed = [1.0]
module = types.ModuleType("settings")
tensor = torch.ones(())


class Settings:
    weight = 1.0


settings = types.SimpleNamespace(weight=1.0)


def plain():
    return 1.0


def doubled():
    return 2.0


weigh = plain


def with_default(found=1.0):
    return found


def _global(value):
    global weight
    weight = value


def _item(value):
    held["weight"] = value


def _entry(value):
    listed[0] = value


def _of_class(value):
    Settings.weight = value


def _of_object(value):
    settings.weight = value


def _of_module(value):
    module.weight = value


def _default(value):
    with_default.__defaults__ = (value,)


def _function(value):
    global weigh
    weigh = doubled if value == 2.0 else plain


def _variable(value):
    os.environ["WATERFLOW_TEST_WEIGHT"] = str(value)


def _content(value):
    tensor.fill_(value)


#: Writers, and what the loss reads of it.
WAYS: dict[str, tuple[Callable[[float], None], Callable[[], Any]]] = {
    "global": (_global, lambda: weight),
    "item": (_item, lambda: held["weight"]),
    "entry": (_entry, lambda: listed[0]),
    "class": (_of_class, lambda: Settings.weight),
    "object": (_of_object, lambda: settings.weight),
    "module": (_of_module, lambda: module.weight),
    "default": (_default, lambda: with_default()),
    "function": (_function, lambda: weigh()),
    "variable": (_variable, lambda: float(os.environ["WATERFLOW_TEST_WEIGHT"])),
    "content": (_content, lambda: tensor),
}


def _entered(name, make):
    make.__name__ = name
    case(*KEPT)(make)


def _read_by_loss(loader, write, read):
    def make(live):
        write(1.0)

        def act(number):
            write(2.0 if live and number in _OTHERS else 1.0)

        def loss(model, batch):
            return cross_entropy(model, batch) * read()

        return job(mlp(), loss, data=loader(act))

    return make


_KINDS = tuple(LOADERS)
for _number, (_way, (_write, _read)) in enumerate(WAYS.items()):
    for _kind in (_KINDS[_number % 4], _KINDS[(_number + 1) % 4]):
        _entered(f"{_kind}_changes_{_way}", _read_by_loss(LOADERS[_kind], _write, _read))


def _in_closure(live):
    found = 1.0

    def act(number):
        nonlocal found
        found = 2.0 if live and number in _OTHERS else 1.0

    def loss(model, batch):
        return cross_entropy(model, batch) * found

    return job(mlp(), loss, data=LOADERS["dataset"](act))


_entered("dataset_changes_closure", _in_closure)


class _Scaled(nn.Module):
    factor = 1.0

    def forward(self, x):
        return x * self.factor


def _in_module(loader):
    """It knows one module alone, which has no parameters."""

    def make(live):
        scaled = _Scaled()

        def act(number):
            scaled.factor = 2.0 if live and number in _OTHERS else 1.0

        return job(nn.Sequential(nn.Linear(16, 4), scaled), data=LOADERS[loader](act))

    return make


def _trained(change):
    """A change of what the job trains, by a sampler over tensors."""

    def make(live):
        model = mlp()
        optimizer = sgd(model)

        def act(number):
            if live:
                change(model, optimizer, number)

        return job(model, optimizer=optimizer, data=LOADERS["sampler"](act))

    return make


def _rate(model, optimizer, number):
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)


def _modes(model, optimizer, number):
    model[0].requires_grad_(number not in _OTHERS)


def _weights(model, optimizer, number):
    if number in _OTHERS:
        with torch.no_grad():
            model[0].weight.mul_(0.5)


_entered("dataset_changes_submodule", _in_module("dataset"))
_entered("sampler_changes_submodule", _in_module("sampler"))
_entered("sampler_changes_rate", _trained(_rate))
_entered("sampler_changes_frozen", _trained(_modes))
_entered("sampler_changes_weights", _trained(_weights))


def _scheduled(live):
    """Between two steps that schedulers were worked out for ahead."""
    model = mlp()
    optimizer = sgd(model)
    scheduler = lr_scheduler.StepLR(optimizer, 5, 0.5)

    def act(number):
        if live and number in _OTHERS:
            scheduler.last_epoch += 1

    return job(model, optimizer=optimizer, scheduler=scheduler, data=LOADERS["sampler"](act))


_entered("sampler_changes_scheduler", _scheduled)


# -- data over the memory of what a step changes


class _OverMemory(Dataset):
    """Rows that are larger by what is in an array when they are read."""

    def __init__(self, array):
        self.rows, self.array = TensorDataset(*_rows()), array

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        x, y = self.rows[index]
        return x * (1 + float(self.array.sum())), y


@case("captured")
def array_of_a_buffer(live):
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    array = model[1].running_mean.numpy()
    data = DataLoader(_OverMemory(array if live else array.copy()), _ROWS)
    return job(model, data=data)


@case("captured")
def array_of_a_part_of_a_weight(live):
    model = mlp()
    array = model[0].weight.detach().numpy()[1:3]
    return job(model, data=DataLoader(_OverMemory(array if live else array.copy()), _ROWS))


@case("captured")
def data_over_the_array_of_a_weight(live):
    model = mlp()
    flat = np.full(64, 0.01, dtype=np.float32)
    model[2].bias = nn.Parameter(torch.from_numpy(flat[60:]))
    array = flat[60:] if live else flat[60:].copy()
    return job(model, data=DataLoader(_OverMemory(array), _ROWS))


class _Filling(_OverMemory):
    """The same rows, which fill the array from the twelfth batch on."""

    def __init__(self, array, live):
        super().__init__(array)
        self.read, self.live = 0, live

    def __getitem__(self, index):
        self.read += 1
        if self.live and self.read > 12 * _ROWS:
            self.array.fill(3.0)
        return self.rows[index]


@case("captured", "recaptured", "opaque")
def data_that_fill_what_the_loss_reads(live):
    array = np.ones(4, dtype=np.float32)
    factor = torch.from_numpy(array)

    def loss(model, batch):
        return cross_entropy(model, batch) * factor[0]

    return job(mlp(), loss, data=DataLoader(_Filling(array, live), _ROWS))


# -- data that look at gradients, which the step before has left


@case("opaque")
def gradients_that_data_look_at(live):
    model = mlp()

    class Following:
        def __iter__(self):
            for inputs, labels in batches():
                found = model[0].weight.grad
                yield inputs * (1 if found is None or not live else 1 + found.norm()), labels

    return job(model, data=Following())


@case("opaque")
def optimizer_that_data_step(live):
    model = mlp()
    optimizer = sgd(model)

    class Stepping:
        def __iter__(self):
            for batch in batches():
                if live:
                    optimizer.step()
                yield batch

    return job(model, optimizer=optimizer, data=Stepping())
