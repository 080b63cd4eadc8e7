"""Hyperparameters, their keys, and layouts of state."""

import pytest
import torch
from torch import nn, optim

from tests.support.jobs import adam
from tests.support.steps import first_batch, job_of
from waterflow.job.optimizer_state import (
    Layout,
    StateEntries,
    hyperparameter_places,
    hyperparameters,
    live_places,
    moved_numbers,
    numbers_of,
    same_hyperparameters,
    same_value,
    state_layout,
    trained_parameters,
)
from waterflow.job.training_step import eager_step

pytestmark = pytest.mark.cpu


def trained():
    job = job_of(optimizer=adam)
    eager_step(job, first_batch(job))
    return job.optimizer


def test_a_layout_makes_its_like():
    tensor = torch.zeros(3, 4, dtype=torch.float64).T
    made = Layout.of(tensor).make()
    assert Layout.of(made) == Layout.of(tensor)
    assert made.stride() == (1, 4)
    assert Layout.of(made) != Layout.of(tensor.contiguous())


def test_tuples_of_numbers_are_taken_apart():
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = optim.Adam([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.5}])
    values = hyperparameters(optimizer)
    assert values[0, "betas", 1] == 0.999
    assert (0, "betas") not in values
    assert (values[0, "lr"], values[1, "lr"]) == (0.001, 0.5)
    assert not any("params" in key for key in values)
    assert trained_parameters(optimizer) == parameters


def test_which_values_are_taken_apart():
    assert numbers_of((0.9, 0.99))
    assert numbers_of([0.5])
    assert not numbers_of((0.9, 1))
    assert not numbers_of(0.9)


def test_moved_numbers_are_named():
    before = {"lr": 0.1, "betas": (0.9, 0.99), "gone": 1}
    assert moved_numbers(before, dict(before)) == []
    now = {"lr": 0.1, "betas": (0.9, 0.9), "new": 1}
    assert set(moved_numbers(before, now)) == {"betas", "gone", "new"}


def test_values_are_the_same_by_kind_and_tensors_by_identity():
    tensor = torch.ones(1)
    assert same_value(tensor, tensor)
    assert not same_value(tensor, tensor.clone())
    assert not same_value(1, 1.0)
    assert not same_value(True, 1)
    assert same_value((1, [2.0]), (1, [2.0]))
    assert not same_value((1,), (1, 2))
    assert not same_value(0.0, -0.0)


def test_hyperparameters_are_the_same_by_kind_and_not_by_equality():
    tensor, values = torch.ones(2), {(0, "lr"): 1.0}
    assert same_hyperparameters(values, {(0, "lr"): 1.0})
    assert not same_hyperparameters(None, values)
    assert not same_hyperparameters(values, {(0, "lr"): True})
    assert not same_hyperparameters(values, {**values, (0, "other"): None})
    assert not same_hyperparameters({(0, "lr"): tensor}, {(0, "lr"): tensor.clone()})
    assert same_hyperparameters({(0, "lr"): tensor}, {(0, "lr"): tensor})


def test_the_layout_of_state_keeps_plain_values():
    optimizer = trained()
    weight = trained_parameters(optimizer)[0]
    optimizer.state[weight]["count"] = 7
    first = state_layout(optimizer)[0]
    assert first["exp_avg"] == Layout.of(weight)
    assert first["count"] == 7
    optimizer.state.pop(weight)
    assert state_layout(optimizer)[0] == {}


@pytest.mark.parametrize(
    ("change", "holds"),
    [
        (lambda state: None, True),
        (lambda state: state["exp_avg"].add_(1), True),
        (lambda state: state.update(count=3), False),
        (lambda state: state.update(exp_avg=state["exp_avg"].clone()), False),
        (lambda state: state.pop("exp_avg"), False),
    ],
    ids=["nothing", "values", "a new entry", "another tensor", "an entry less"],
)
def test_entries_are_seen_to_come_and_go(change, holds):
    optimizer = trained()
    entries = StateEntries(optimizer)
    change(optimizer.state[trained_parameters(optimizer)[0]])
    assert entries.holds(optimizer) is holds


def test_plain_values_may_count_and_another_dictionary_is_another_state():
    optimizer = trained()
    optimizer.state[trained_parameters(optimizer)[0]]["count"] = 1
    entries = StateEntries(optimizer)
    optimizer.state[trained_parameters(optimizer)[0]]["count"] = 2
    assert entries.holds(optimizer)
    optimizer.state = type(optimizer.state)(optimizer.state.default_factory, optimizer.state)
    assert not entries.holds(optimizer)


def test_what_captures_follow_by_themselves_is_left_out_of_accounts():
    optimizer = trained()
    places = hyperparameter_places(optimizer)
    (group,) = optimizer.param_groups
    assert {"lr", "betas"} <= places[id(group)]
    assert "params" not in places[id(group)]
    group |= {"dict": {}, "list": ["a"], "inside": ([1.0],), "numbers": [1.0], "tuple": (1, "a")}
    followed = hyperparameter_places(optimizer)[id(group)] - places[id(group)]
    assert followed == {"numbers", "tuple"}
    assert "state" in live_places(optimizer)[id(optimizer)]
