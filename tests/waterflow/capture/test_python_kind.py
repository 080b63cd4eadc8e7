"""Roots that are made of the same code are of one kind, and no others."""

from __future__ import annotations

import functools
from typing import Any

import optuna
import pytest
import torch
from torch import nn

from waterflow.capture.python_kind import kind_of_python

pytestmark = pytest.mark.cpu


def plain(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).sum()


def other(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).mean()


class Holds:
    def __init__(self, held: Any) -> None:
        self.held = held


class InSlots:
    __slots__ = ("empty", "held")

    def __init__(self, held: Any) -> None:
        self.held = held


def kind(root: Any) -> Any:
    return kind_of_python({"root": root})


def around(held: Any) -> Any:
    return lambda: held


def by_default(held: Any) -> Any:
    return lambda held=held: held


def with_hook(held: Any) -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(held)
    return layer


def with_hook_of_a_weight(held: Any) -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.weight.register_hook(held)
    return layer


def with_attribute(held: Any) -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.held = {"a": [held]}
    return nn.Sequential(layer)


WAYS = [
    *(Holds, InSlots, around, by_default, functools.partial, with_hook, with_attribute),
    with_hook_of_a_weight,
    *(lambda held: [held], lambda held: {1: (held,)}, lambda held: frozenset([held])),
    lambda held: Holds(held).__init__,
]


@pytest.mark.parametrize("make", WAYS)
def test_what_is_held_counts_and_what_is_constant_does_not(make):
    assert kind(make(plain)) == kind(make(plain)) is not None
    assert kind(make(plain)) != kind(make(other))


def test_numbers_and_tensors_say_nothing():
    assert kind(Holds(1.0)) == kind(Holds(2.0))
    assert kind(Holds(torch.ones(1))) == kind(Holds(torch.zeros(3)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: [Holds(number) for number in range(1000)],
        lambda: functools.reduce(lambda held, _: Holds(held), range(50), plain),
    ],
    ids=["many", "deep"],
)
def test_what_holds_too_much_is_of_no_kind(make):
    assert kind(make()) is None


def test_a_traced_module_has_a_kind():
    traced = [torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)) for _ in range(2)]
    one, another = (kind(nn.Sequential(each)) for each in traced)
    assert one == another is not None
    assert one != kind(nn.Sequential(nn.Linear(2, 2)))


def test_a_module_that_holds_itself_by_its_hooks_is_of_no_kind():
    assert kind(nn.Sequential(nn.LazyLinear(2))) is None


class OwnSampler(optuna.samplers.RandomSampler):
    """A user's."""


def reporting_to(study: optuna.Study) -> Any:
    trial = study.ask({"x": optuna.distributions.FloatDistribution(0, 1)})
    return lambda step: trial.report(0.5, step)


def note(study: optuna.Study, trials: int) -> None:
    for _ in range(trials):
        study.tell(study.ask({"x": optuna.distributions.FloatDistribution(0, 1)}), 0.1)


@pytest.mark.parametrize("sampler", [optuna.samplers.TPESampler, optuna.samplers.RandomSampler])
def test_trials_of_a_study_are_of_one_kind_however_many_there_were(sampler):
    """What a study has noted is nobody's code, but its sampler may be."""
    study = optuna.create_study(sampler=sampler(seed=0))
    note(study, 12)  # a sampler goes over from drawing at random to a model of what it was told
    first = kind(reporting_to(study))
    note(study, 100)
    assert kind(reporting_to(study)) == first is not None
    other = optuna.create_study(sampler=OwnSampler(seed=0))
    note(other, 12)
    assert kind(reporting_to(other)) != first
