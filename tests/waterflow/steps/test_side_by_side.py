"""Which eager steps go in turn, by what was seen of them side by side."""

import pytest

from waterflow.steps.side_by_side import SideBySide

pytestmark = pytest.mark.virtual


def test_eager_steps_that_lose_side_by_side_go_in_turn_from_then_on():
    learnt = SideBySide()
    first = learnt.fine_seconds
    learnt.note(8e-6, 0.7)
    assert learnt.fine_seconds == first
    learnt.note(8e-6, 0.9)
    learnt.note(8e-6, 0.6)
    learnt.note(8e-6, 20.0)
    assert learnt.fine_seconds == first, "something may have come between"
    learnt.note(8e-6, 0.9)
    assert 8e-6 < learnt.fine_seconds < 12e-6
    learnt.note(3e-6, 1.1)
    assert learnt.fine_seconds > 8e-6


def test_a_clear_loss_is_seen_at_once():
    learnt = SideBySide()
    learnt.note(8e-6, 1.2)
    assert 8e-6 < learnt.fine_seconds < 12e-6


def test_what_was_seen_holds_for_shorter_ones_that_lose_and_longer_ones_that_gain():
    learnt = SideBySide()
    assert not learnt.is_known(20e-6)
    learnt.note(10e-6, 1.2)
    learnt.note(10e-6, 1.2)
    assert learnt.is_known(6e-6)
    assert not learnt.is_known(20e-6)
    learnt.note(20e-6, 0.6)
    assert learnt.is_known(20e-6)
    assert learnt.is_known(1e-3)
