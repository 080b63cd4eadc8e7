"""When captures that replace others have become too many."""

import math

import pytest

from tests.support.steps import specialization
from waterflow.common.errors import CaptureError
from waterflow.steps.recaptures import Recaptures, StillChangingError

pytestmark = pytest.mark.virtual


def stale(runs):
    made = specialization(changed="global 'beta'")
    made.runs = runs
    return made


def test_one_former_capture_counts_once():
    recaptures, former = Recaptures("a"), stale(100)
    recaptures.count_after(former)
    recaptures.count_after(former)
    assert recaptures.count == 1


def test_the_third_in_haste_is_too_many():
    recaptures = Recaptures("a")
    recaptures.count_after(stale(7))
    recaptures.count_after(stale(8))  # has paid
    recaptures.count_after(stale(0))
    with pytest.raises(CaptureError, match=r"job 'a': global 'beta' has changed 4 times") as caught:
        recaptures.count_after(stale(3))
    assert caught.value.reason == "global 'beta' changes too often for captures"


def test_one_that_has_not_saved_what_it_took_was_in_haste():
    recaptures = Recaptures("a")
    for runs in (150, 99, 20):
        recaptures.count_after(stale(runs), runs_to_pay=100)
    with pytest.raises(CaptureError, match="has changed 4 times"):
        recaptures.count_after(stale(99), runs_to_pay=100)


def test_the_thirty_third_is_too_many():
    recaptures = Recaptures("a")
    for _ in range(32):
        recaptures.count_after(stale(100))
    with pytest.raises(CaptureError, match="33 times"):
        recaptures.count_after(stale(100))


def test_captures_that_have_paid_are_never_too_many():
    recaptures = Recaptures("a")
    for _ in range(100):
        recaptures.count_after(stale(100), runs_to_pay=60)
    assert recaptures.count == 100


def test_what_went_with_the_state_counts_at_the_next_capture():
    recaptures = Recaptures("a")
    recaptures.note_dropped()
    assert recaptures.count == 0
    recaptures.count_dropped()
    recaptures.count_dropped()
    assert recaptures.count == 1


def waits(recaptures, former, runs_to_pay=40.0):
    """For how many steps; 0: not at all."""
    try:
        recaptures.wait_for("batches", former, runs_to_pay)
    except StillChangingError as waiting:
        return waiting.steps
    return 0


def test_what_has_changed_before_it_paid_is_waited_for():
    recaptures = Recaptures("a")
    assert waits(recaptures, stale(20), 39.5) == 40
    assert waits(recaptures, None) == 0, "it has not changed since"
    assert recaptures.count == 1
    assert waits(recaptures, stale(20)) == 80, "not for the first time"
    assert recaptures.count == 1


def test_what_changes_again_meanwhile_is_waited_for_twice_as_long():
    recaptures = Recaptures("a")
    assert waits(recaptures, stale(20)) == 40
    for steps in (80, 160):
        recaptures._waits["batches"].state.changed = "global 'beta'"
        assert waits(recaptures, None) == steps
    assert waits(recaptures, None) == 0


def test_what_paid_or_is_not_known_to_or_was_quick_is_not_waited_for():
    recaptures = Recaptures("a")
    assert waits(recaptures, None) == 0
    assert waits(recaptures, stale(40)) == 0
    assert waits(recaptures, stale(20), 0.0) == 0
    assert waits(recaptures, stale(20), math.inf) == 0
    assert waits(recaptures, stale(1)) == 0, "it may go back and forth"
    recaptures.count_after(stale(1), 40.0)
    assert waits(recaptures, stale(1)) == 40
