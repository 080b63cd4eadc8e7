"""How much slower a job is beside others: told from turns that follow each other."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from waterflow.allocator_ext import _C

pytestmark = pytest.mark.virtual

TOLERANCE = 0.01
MOST_SECONDS = 4.0
seeds = st.integers(0, 2**32 - 1)


def make(tolerance: float = TOLERANCE) -> _C.Alternation:
    return _C.Alternation(_C.Precedence(), tolerance, MOST_SECONDS)


def compared(
    seconds: Callable[[float, bool], float],
    *,
    kind: Callable[[int], int] = lambda number: 0,
    disturbed: Callable[[int], bool] = lambda number: False,
    most: float = 60.0,
) -> tuple[tuple[float, float], float]:
    """What is told of a job whose steps take so many seconds, by the time and by whether others
    are held; and after how many seconds."""
    alternation = make()
    now, number = 0.0, 0
    while (harm := alternation.harm) is None:
        assert now < most
        took = seconds(now, alternation.holds)
        alternation.note(kind(number), took, 1, disturbed=disturbed(number))
        now, number = now + took, number + 1
    return harm, now


@settings(max_examples=30, deadline=None)
@given(step=st.floats(1e-4, 0.02), harm=st.floats(0.0, 0.3), noise=st.floats(0.0, 0.1), seed=seeds)
def test_what_is_told_is_the_harm(step: float, harm: float, noise: float, seed: int) -> None:
    random = np.random.default_rng(seed)

    def seconds(_: float, alone: bool) -> float:
        return float(step * (1 if alone else 1 + harm) * np.exp(noise * random.normal()))

    (slowdown, error), _ = compared(seconds)
    assert abs(slowdown - harm) < 6 * error + 0.002


@settings(max_examples=20, deadline=None)
@given(seed=seeds, swing=st.floats(0.1, 0.5), period=st.floats(1.0, 10.0))
def test_a_machine_that_wanders_is_nobodys_harm(seed: int, swing: float, period: float) -> None:
    random = np.random.default_rng(seed)

    def seconds(now: float, _: bool) -> float:
        wander = 1 + swing * np.sin(2 * np.pi * now / period)
        return float(0.001 * wander * np.exp(0.05 * random.normal()))

    (slowdown, error), _ = compared(seconds)
    assert abs(slowdown) < 5 * error + 0.002


@pytest.mark.parametrize("step", [0.001, 0.005])
def test_a_core_that_others_use_at_times_is_nobodys_harm(step: float) -> None:
    """It has two speeds, each for a tenth of a second or so, whoever is held."""
    found = []
    for seed in range(20):
        random = np.random.default_rng(seed)
        until, slow = 0.0, False

        def seconds(now: float, _: bool, random: Any = random) -> float:
            nonlocal until, slow
            if now >= until:
                until, slow = now + random.exponential(0.15), not slow
            return float(step * (1.7 if slow else 1.0) * np.exp(0.03 * random.normal()))

        found.append(compared(seconds)[0])
    harmful = [slowdown > TOLERANCE + error for slowdown, error in found]
    assert np.mean(harmful) <= 0.15
    assert abs(np.mean([slowdown for slowdown, _ in found])) < TOLERANCE


def test_little_harm_is_told_where_the_core_has_two_speeds() -> None:
    random = np.random.default_rng(0)
    until, slow = 0.0, False

    def seconds(now: float, alone: bool) -> float:
        nonlocal until, slow
        if now >= until:
            until, slow = now + random.exponential(0.15), not slow
        return float(0.001 * (1.7 if slow else 1.0) * (1.0 if alone else 1.04))

    (slowdown, error), _ = compared(seconds)
    assert slowdown > TOLERANCE + error
    assert abs(slowdown - 0.04) < 4 * error


def test_great_harm_is_told_at_once_and_little_with_care() -> None:
    random = np.random.default_rng(0)

    def harmed(harm: float) -> Any:
        def seconds(_: float, alone: bool) -> float:
            return float(0.002 * (1 if alone else 1 + harm) * np.exp(0.08 * random.normal()))

        return seconds

    _, soon = compared(harmed(0.3))
    _, late = compared(harmed(0.0))
    assert soon < 0.5 < late < 8.0


def test_only_equal_kinds_are_compared() -> None:
    """Steps of two kinds in turns of their own: what one takes says nothing of the other."""
    long = {True: 0.02, False: 0.04}

    def run(kinds: bool) -> tuple[float, float] | None:
        alternation, now = make(), 0.0
        while alternation.harm is None and now < 60:
            took = long[now % 1 < 0.5]
            alternation.note(int(1000 * took) if kinds else 0, took, 1)
            now += took
        return alternation.harm

    assert run(kinds=True) == (0.0, 0.0)


def test_a_pause_of_the_process_is_not_taken_for_harm() -> None:
    """Once in a while a step takes a hundred times as long, whoever is beside it."""
    random = np.random.default_rng(1)

    def seconds(_: float, alone: bool) -> float:
        return 0.2 if random.random() < 0.01 else float(0.002 * np.exp(0.02 * random.normal()))

    (slowdown, error), _ = compared(seconds)
    assert slowdown < TOLERANCE + 3 * error


def test_time_alone_that_was_not_does_not_count() -> None:
    """Others' eager steps that were under way went on while they were to be held."""
    alternation = make()
    for _ in range(1000):
        alternation.note(0, 0.002, 1, disturbed=True)
    assert alternation.holds
    found, _ = compared(lambda now, alone: 0.002, disturbed=lambda number: number % 2 == 0)
    assert found == pytest.approx((0.0, 0.0))


@pytest.mark.parametrize("batches", [7, 16, 25])
@pytest.mark.parametrize("step", [0.0012, 0.0027, 0.006])
def test_epochs_that_keep_step_with_turns_are_no_harm(batches: int, step: float) -> None:
    """The step that begins an epoch takes longer: turns have regular shares of them, other ones
    alone than beside others."""
    random = np.random.default_rng(0)
    done, found = 0, []
    for _ in range(8):
        alternation = make()
        while (harm := alternation.harm) is None:
            begins = done == 0
            took = step * np.exp(0.03 * random.normal()) + 0.003 * begins
            alternation.note(int(begins), took, 1)
            done = (done + 1) % batches
        found.append(harm[0])
    assert abs(np.mean(found)) < 0.01


def test_steps_that_are_told_of_singly_are_not_told_of_again() -> None:
    alternation = make()
    for _ in range(3):  # of which the first do not count
        alternation.begin()
        alternation.step_done(0)
    time.sleep(0.01)
    alternation.leave(0, 1)
    assert alternation.holds
    alternation.begin()
    time.sleep(0.006)
    alternation.leave(0, 1)  # told of by nobody else: a turn alone
    assert not alternation.holds


def test_others_are_held_until_the_comparison_is_stopped() -> None:
    precedence = _C.Precedence()
    alternation = _C.Alternation(precedence, TOLERANCE, MOST_SECONDS)
    assert precedence.holds
    assert alternation.holds
    alternation.stop()
    assert not precedence.holds
    for _ in range(100):
        alternation.note(0, 0.01, 1)  # of a step that was under way
    assert not precedence.holds


@pytest.mark.parametrize("tolerance", [0.0, -0.01, math.nan])
def test_a_tolerance_that_is_none(tolerance: float) -> None:
    with pytest.raises(ValueError, match="a tolerance is above 0, got"):
        make(tolerance)


def test_with_no_end_to_what_is_tolerated_harm_is_told_with_care() -> None:
    random = np.random.default_rng(0)
    alternation = make(math.inf)
    while (harm := alternation.harm) is None:
        beside = 1.0 if alternation.holds else 1.2
        alternation.note(0, 0.001 * beside * np.exp(0.05 * random.normal()), 1)
    assert abs(harm[0] - 0.2) < 0.03
