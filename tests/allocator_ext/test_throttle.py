"""A throttle: rests are owed for the time of jobs that go first, and paid in it."""

from __future__ import annotations

import math
import threading
import time

import pytest

from tests.support.waiting import wait_until
from waterflow.allocator_ext import _C

pytestmark = pytest.mark.virtual


def make(duty: float = 1.0) -> tuple[_C.Precedence, _C.Signal, _C.Throttle]:
    precedence, signal = _C.Precedence(), _C.Signal()
    throttle = _C.Throttle(precedence, signal)
    throttle.duty = duty
    return precedence, signal, throttle


def test_the_clock_runs_while_somebody_works() -> None:
    precedence = _C.Precedence()
    assert not precedence.is_busy
    assert precedence.seconds == 0.0
    precedence.enter()
    precedence.enter()
    time.sleep(0.01)
    precedence.leave()
    assert precedence.is_busy
    precedence.leave()
    stopped = precedence.seconds
    assert stopped >= 0.01
    time.sleep(0.01)
    assert precedence.seconds == stopped
    with pytest.raises(RuntimeError, match="no job that goes first is at work"):
        precedence.leave()


def test_what_nobody_misses_costs_nothing() -> None:
    precedence, _, throttle = make(duty=0.0)
    assert throttle.may_begin()
    throttle.begin()
    time.sleep(0.005)
    throttle.pause()  # returns at once
    throttle.end()
    assert throttle.rested_seconds == 0.0
    precedence.enter()
    assert not throttle.may_begin()
    assert math.isinf(throttle.due)


@pytest.mark.parametrize("duty", [0.2, 0.5, 0.9])
def test_work_is_owed_by_the_duty_and_paid_in_the_others_time(duty: float) -> None:
    precedence, _, throttle = make(duty)
    precedence.enter()
    before = precedence.seconds
    throttle.begin()
    time.sleep(0.02)
    throttle.end()
    worked = precedence.seconds - before
    owed = throttle.due
    assert 0 < owed <= worked * (1 - duty) / duty
    assert not throttle.may_begin()
    precedence.leave()
    assert throttle.may_begin()  # as nobody minds, but the debt stays
    assert throttle.due > 0
    precedence.enter()
    time.sleep(owed + 0.002)
    assert throttle.may_begin()
    assert throttle.due == 0.0


def test_a_pause_rests_in_the_middle_of_work() -> None:
    precedence, _, throttle = make(0.25)
    precedence.enter()
    throttle.begin()
    time.sleep(0.01)
    throttle.pause()
    assert throttle.rested_seconds >= 3 * 0.01 * 0.9
    owed, clock = throttle.due, precedence.seconds
    worked = clock - throttle.rested_seconds
    assert owed <= 3 * worked - throttle.rested_seconds + 0.01


@pytest.mark.parametrize("how", ["leave", "call", "duty"])
def test_what_ends_a_pause(how: str) -> None:
    precedence, signal, throttle = make(1e-6)
    precedence.enter()
    throttle.begin()
    time.sleep(0.001)  # a thousand seconds of rest
    rests = threading.Thread(target=throttle.pause)
    rests.start()
    wait_until(lambda: throttle.due > throttle.due)  # owed less and less: it rests
    assert rests.is_alive()
    match how:
        case "leave":
            precedence.leave()
        case "call":
            signal.call()
        case "duty":
            throttle.duty = 1.0
    rests.join(60)
    assert not rests.is_alive()
    assert throttle.rested_seconds > 0


def test_queued_work_is_owed_by_its_profile() -> None:
    precedence, _, throttle = make(0.5)
    throttle.owe(1.0)
    assert throttle.due == 0.0  # nobody was at work
    precedence.enter()
    throttle.owe(100.0)
    assert 99.0 < throttle.due <= 100.0


@pytest.mark.parametrize("duty", [-0.1, 1.1, math.nan])
def test_a_duty_is_a_share(duty: float) -> None:
    _, _, throttle = make()
    with pytest.raises(ValueError, match="a duty is a share from 0 to 1, got"):
        throttle.duty = duty
