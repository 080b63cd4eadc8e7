"""Cases: the step goes by settings of libraries, or by what torch's Python reads from outside."""

from __future__ import annotations

import contextlib
import csv
import datetime
import decimal
import functools
import logging
import os
import sys
import tempfile
import time
import types
import weakref
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from tests.exactness.case import STEPS, Net, Subject, at, batches, case, cross_entropy, job, mlp

# -- settings that nobody passes on


def shortens_decimals():
    decimal.getcontext().prec = 2


@case("recaptured", around=decimal.localcontext)
def decimals_held_are_divided(live):
    one, three = decimal.Decimal(1), decimal.Decimal(3)
    decimal.getcontext().prec = 28

    def loss(model, batch):
        return cross_entropy(model, batch) * float(one / three)

    return job(mlp(), loss, on_step=at(4, live, shortens_decimals))


@case("recaptured", around=decimal.localcontext)
def decimals_made_in_the_step(live):
    decimal.getcontext().prec = 28

    def loss(model, batch):
        return cross_entropy(model, batch) * float(decimal.Decimal(1) / 3)

    return job(mlp(), loss, on_step=at(4, live, shortens_decimals))


@case("recaptured", around=decimal.localcontext)
def decimals_by_an_import_of_the_step(live):
    decimal.getcontext().prec = 28

    def loss(model, batch):
        from decimal import Decimal as Number

        return cross_entropy(model, batch) * float(Number(1) / 3)

    return job(mlp(), loss, on_step=at(4, live, shortens_decimals))


@case("recaptured", around=decimal.localcontext)
def decimal_attribute_is_rounded(live):
    decimal.getcontext().prec = 28

    class Scaled(Net):
        def __init__(self):
            super().__init__()
            self.scales = {"a": [decimal.Decimal("1.23456")]}

        def factor(self, x):
            return float(+self.scales["a"][0])

    return job(Scaled(), on_step=at(4, live, shortens_decimals))


@case("recaptured", around=np.errstate)
def numpy_begins_to_raise(live):
    np.seterr(all="ignore")

    def loss(model, batch):
        try:
            scale = 1.0 if np.isinf(np.float64(1) / np.float64(0)) else 0.0
        except FloatingPointError:
            scale = 3.0
        return cross_entropy(model, batch) * scale

    return job(mlp(), loss, on_step=at(4, live, lambda: np.seterr(all="raise")))


@case("recaptured", around=np.errstate)
def numpy_numbers_of_the_model_begin_to_raise(live):
    np.seterr(all="ignore")

    class Scaled(Net):
        def __init__(self):
            super().__init__()
            self.one, self.none = torch.nn.Linear(16, 32), torch.nn.Identity()
            self.numbers = [np.float32(1), np.float32(0)]

        def factor(self, x):
            try:
                self.numbers[0] / self.numbers[1]
            except FloatingPointError:
                return 3.0
            return 1.0

    return job(Scaled(), on_step=at(4, live, lambda: np.seterr(all="raise")))


@case("recaptured", around=np.errstate)
def numpy_errors_are_asked_for(live):
    np.seterr(all="ignore")

    def loss(model, batch):
        return cross_entropy(model, batch) * (3.0 if np.geterr()["divide"] == "raise" else 1.0)

    return job(mlp(), loss, on_step=at(4, live, lambda: np.seterr(all="raise")))


@case("recaptured", around=np.printoptions)
def numpy_prints_otherwise(live):
    np.set_printoptions(precision=8)

    def loss(model, batch):
        return cross_entropy(model, batch) * (np.get_printoptions()["precision"] / 8)

    return job(mlp(), loss, on_step=at(4, live, lambda: np.set_printoptions(precision=3)))


@contextlib.contextmanager
def csv_limit():
    before = csv.field_size_limit(1000)
    try:
        yield
    finally:
        csv.field_size_limit(before)


@case("opaque", around=csv_limit)
def csv_limit_is_asked_for(live):
    csv.field_size_limit(1000)

    def loss(model, batch):
        return cross_entropy(model, batch) * (csv.field_size_limit() / 1000)

    return job(mlp(), loss, on_step=at(4, live, lambda: csv.field_size_limit(3000)))


@contextlib.contextmanager
def warn_always():
    before = torch.is_warn_always_enabled()
    try:
        yield
    finally:
        torch.set_warn_always(before)


@case("opaque", around=warn_always, alone=True)
def warn_always_is_asked_for(live):
    torch.set_warn_always(False)

    def loss(model, batch):
        return cross_entropy(model, batch) * (1 + torch.is_warn_always_enabled())

    return job(mlp(), loss, on_step=at(4, live, lambda: torch.set_warn_always(True)))


@case("recaptured")
def logger_is_looked_up_by_its_name(live):
    name = f"{__name__}.looked_up"
    logging.getLogger(name).setLevel(10)

    def loss(model, batch):
        return cross_entropy(model, batch) * (logging.getLogger(name).level / 10)

    return job(mlp(), loss, on_step=at(4, live, lambda: logging.getLogger(name).setLevel(30)))


# -- containers in libraries' modules


@contextlib.contextmanager
def arguments():
    with mock.patch.object(sys, "argv", ["train", "1.0"]):
        yield


@case("recaptured", around=arguments, alone=True)
def argument_of_the_process(live):
    sys.argv[1] = "1.0"

    def loss(model, batch):
        return cross_entropy(model, batch) * float(sys.argv[1])

    return job(mlp(), loss, on_step=at(4, live, lambda: sys.argv.__setitem__(1, "3.0")))


def hung_on(module, name, value):
    """Puts something into a library's module for a while."""
    return lambda: mock.patch.object(module, name, value, create=True)


SCALES, LISTED = {"scale": 1.0}, [1.0]


@case("recaptured", around=hung_on(torch, "scales_of_the_case", SCALES), alone=True)
def dictionary_hung_on_torch(live):
    SCALES["scale"] = 1.0

    def loss(model, batch):
        return cross_entropy(model, batch) * torch.scales_of_the_case["scale"]

    return job(mlp(), loss, on_step=at(4, live, lambda: SCALES.update(scale=3.0)))


@case("recaptured", around=hung_on(np, "scales_of_the_case", LISTED), alone=True)
def list_hung_on_numpy(live):
    LISTED[:] = [1.0]

    def loss(model, batch):
        return cross_entropy(model, batch) * np.scales_of_the_case[0]

    return job(mlp(), loss, on_step=at(4, live, lambda: LISTED.__setitem__(0, 3.0)))


# -- plain variables of libraries' modules


@case("recaptured", around=lambda: mock.patch.object(tempfile, "tempdir", "a"), alone=True)
def folder_of_temporary_files(live):
    tempfile.tempdir = "a"

    def loss(model, batch):
        return cross_entropy(model, batch) * len(tempfile.gettempdir())

    return job(mlp(), loss, on_step=at(4, live, lambda: setattr(tempfile, "tempdir", "bcd")))


@contextlib.contextmanager
def strategy():
    before = torch.multiprocessing.get_sharing_strategy()
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


@case("recaptured", around=strategy, alone=True)
def strategy_of_sharing(live):
    torch.multiprocessing.set_sharing_strategy("file_descriptor")
    change = functools.partial(torch.multiprocessing.set_sharing_strategy, "file_system")

    def loss(model, batch):
        is_short = torch.multiprocessing.get_sharing_strategy() == "file_system"
        return cross_entropy(model, batch) * (3.0 if is_short else 1.0)

    return job(mlp(), loss, on_step=at(4, live, change))


class Told(torch.distributions.Normal):
    """A distribution of the user's."""


@contextlib.contextmanager
def divergences():
    known = torch.distributions.kl._KL_REGISTRY
    before = dict(known)
    try:
        yield
    finally:
        known.clear()
        known.update(before)
        torch.distributions.kl._KL_MEMOIZE.clear()


@case("opaque", "recaptured", around=divergences, alone=True)
def divergence_of_a_pair_is_registered(live):
    torch.distributions.kl._KL_REGISTRY.pop((Told, Told), None)
    torch.distributions.kl._KL_MEMOIZE.clear()
    one, other = (Told(0.0, scale, validate_args=False) for scale in (1.0, 2.0))

    def change():
        torch.distributions.register_kl(Told, Told)(lambda p, q: torch.tensor(3.0))

    def loss(model, batch):
        divergence = torch.distributions.kl_divergence(one, other)
        return cross_entropy(model, batch) * float(divergence)

    return job(mlp(), loss, on_step=at(4, live, change))


@contextlib.contextmanager
def invariants():
    checks = torch.sparse.check_sparse_tensor_invariants
    was_on = checks.is_enabled()
    try:
        yield
    finally:
        (checks.enable if was_on else checks.disable)()


@case("opaque", around=invariants, alone=True)  # as it catches what that raises
def sparse_tensors_begin_to_be_checked(live):
    torch.sparse.check_sparse_tensor_invariants.disable()
    wrong = torch.tensor([[0, 9]]), torch.ones(2)

    def loss(model, batch):
        try:
            torch.sparse_coo_tensor(*wrong, (3,))
        except RuntimeError:
            return cross_entropy(model, batch) * 3.0
        return cross_entropy(model, batch)

    change = torch.sparse.check_sparse_tensor_invariants.enable
    return job(mlp(), loss, on_step=at(4, live, change))


# -- modules by their names


@case("opaque", around=lambda: mock.patch.dict(sys.modules), alone=True)
def module_by_its_name(live):
    module = sys.modules["module_of_the_case"] = types.ModuleType("module_of_the_case")
    module.scale = 1.0

    def loss(model, batch):
        return cross_entropy(model, batch) * __import__("module_of_the_case").scale

    return job(mlp(), loss, on_step=at(4, live, lambda: setattr(module, "scale", 3.0)))


# -- the time zone


@contextlib.contextmanager
def zone():
    with mock.patch.dict(os.environ):
        yield
    time.tzset()


def moves_to(name):
    os.environ["TZ"] = name
    time.tzset()


@case("opaque", around=zone, alone=True)
def hour_of_the_first_second(live):
    moves_to("UTC")

    def loss(model, batch):
        hour = datetime.datetime.fromtimestamp(0).hour
        return cross_entropy(model, batch) * (1 + hour)

    return job(mlp(), loss, on_step=at(4, live, functools.partial(moves_to, "Asia/Tokyo")))


# -- what torch's own Python reads from outside


def file_of(value):
    path = Path(tempfile.mkdtemp()) / "value.pt"
    torch.save(value, path)
    return path


@case("opaque")
def number_loaded_from_a_file(live):
    path = file_of({"scale": 1.0})

    def loss(model, batch):
        return cross_entropy(model, batch) * torch.load(path)["scale"]

    return job(mlp(), loss, on_step=at(4, live, lambda: torch.save({"scale": 3.0}, path)))


@case("opaque")
def number_loaded_by_the_model(live):
    path = file_of(1.0)

    class Loading(Net):
        def factor(self, x):
            return torch.load(path)

    return job(Loading(), on_step=at(4, live, lambda: torch.save(3.0, path)))


@case("opaque", matters=False)
def loss_saved_by_each_step(live):
    path, found = file_of(0.0), []

    def loss(model, batch):
        value = cross_entropy(model, batch)
        torch.save(value.detach().clone(), path)
        return value

    made = job(mlp(), loss, on_step=lambda result: found.append(torch.load(path).item()))
    return Subject(made, lambda: list(found))


@case("opaque", matters=False)
def epoch_saved_by_each_step(live):
    path = file_of(0)
    calls = []

    def loss(model, batch):
        torch.save({"calls": 1}, path)
        return cross_entropy(model, batch)

    def on_step(result):
        calls.append(path.exists())
        path.unlink(missing_ok=True)

    return Subject(job(mlp(), loss, on_step=on_step), lambda: list(calls))


@case("opaque")
def seed_is_asked_for(live):
    def loss(model, batch):
        return cross_entropy(model, batch) * (1 + torch.initial_seed() % 7)

    return job(mlp(), loss, on_step=at(4, live, lambda: torch.manual_seed(6)))


@case("opaque")
def tensor_becomes_shared(live):
    tensor = torch.ones(3)

    def loss(model, batch):
        return cross_entropy(model, batch) * (1 + tensor.is_shared())

    return job(mlp(), loss, on_step=at(4, live, lambda: tensor.share_memory_()))


@case("opaque")
def storage_grows(live):
    tensor = torch.ones(3)

    def loss(model, batch):
        return cross_entropy(model, batch) * tensor.untyped_storage().nbytes()

    change = lambda: tensor.untyped_storage().resize_(24)  # noqa: E731
    return job(mlp(), loss, on_step=at(4, live, change))


@case("opaque")
def weak_references_are_counted(live):
    held, kept = Net(), []

    def loss(model, batch):
        return cross_entropy(model, batch) * (1 + weakref.getweakrefcount(held))

    change = lambda: kept.append(weakref.ref(held, print))  # noqa: E731
    return job(mlp(), loss, on_step=at(4, live, change))


# -- tensors that stand twice in a batch


def repeated(live, made):
    """Batches of which every third has two different tensors, if it is live."""
    return [
        made(rows, rows.clone() if live and number % 3 == 0 else rows)
        for number, (rows, _) in enumerate(batches())
    ]


def sum_of_squares(model, rows, target):
    return (model(rows) ** 2).mean() * (3.0 if rows is target else 1.0)


@case("captured", "recaptured")
def tensor_twice_in_a_tuple(live):
    data = repeated(live, lambda rows, target: (rows, target))
    return job(mlp(), lambda model, batch: sum_of_squares(model, *batch), data=data)


@case("captured", "recaptured")
def tensor_twice_in_a_dictionary(live):
    data = repeated(live, lambda rows, target: {"rows": rows, "parts": [target]})
    return job(
        mlp(),
        lambda model, batch: sum_of_squares(model, batch["rows"], batch["parts"][0]),
        data=data,
    )


@case("captured", "recaptured", matters=False)
def tensor_twice_in_every_batch(live):
    data = [(rows, rows) for rows, _ in batches()]
    return job(mlp(), lambda model, batch: sum_of_squares(model, *batch), data=data)


def llama(live, masked):
    """A network of transformers' that skips a mask of ones alone, unless it is traced."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(config)
    data = [{"input_ids": torch.randint(5, 50, (4, 70))} for _ in range(STEPS)]
    for n, batch in enumerate(data if masked else ()):
        batch["attention_mask"] = torch.ones(4, 70, dtype=torch.long)
        if live and n not in (3, 4):
            batch["attention_mask"][0, -2:] = 0

    def loss(model, batch):
        return model(**batch, labels=batch["input_ids"]).loss

    return job(model, loss, data=data, optimizer=torch.optim.SGD(model.parameters(), lr=0.05))


@case("captured")
def mask_of_ones_is_skipped(live):
    return llama(live, masked=True)


@case("captured", matters=False)
def no_mask_is_asked_for(live):
    return llama(live, masked=False)
