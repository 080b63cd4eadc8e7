"""Kept specializations: how many, which are right, and what is known of a signature."""

import pytest
import torch

from tests.support.steps import specialization
from waterflow.steps.specializations import Specializations

pytestmark = pytest.mark.virtual


def kept_of(*entries):
    kept = Specializations()
    for entry in entries:
        kept.add("x", entry)
    return kept


def test_the_latest_come_last_and_only_so_many_stay():
    made = [specialization() for _ in range(6)]
    assert kept_of(*made).of("x") == made[2:]


def test_what_one_gets_is_ones_own():
    kept = kept_of(specialization())
    kept.of("x").clear()
    assert len(kept.of("x")) == 1


def test_only_one_whose_assumptions_hold_is_valid():
    stale, right = specialization(changed="a global"), specialization()
    assert kept_of(stale, right).valid("x") is right
    assert kept_of(stale).valid("x") is None
    assert kept_of(right).valid("y") is None


def test_a_signature_stays_known_when_nothing_is_left_of_it():
    one = specialization()
    kept = kept_of(one)
    kept.announce("y")
    kept.drop(one)
    assert kept.of("x") == []
    assert "x" in kept
    assert len(kept) == 2
    kept.clear()
    assert "x" not in kept
    assert not len(kept)


def test_steps_and_constants_are_those_of_all_signatures():
    tensors = torch.zeros(1), torch.ones(1)
    one, other = (specialization(constants=[tensor]) for tensor in tensors)
    kept = kept_of(one)
    kept.add("y", other)
    assert kept.steps() == [one.steady, other.steady]
    assert [id(tensor) for tensor in kept.constants()] == [id(tensor) for tensor in tensors]
