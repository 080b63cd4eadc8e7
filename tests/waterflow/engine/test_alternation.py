"""How much slower a job is beside others: told from turns that follow each other."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from waterflow.engine.alternation import Alternation, Harm

pytestmark = pytest.mark.virtual

TOLERANCE = 0.01
seeds = st.integers(0, 2**32 - 1)


def compared(
    seconds: Callable[[float, bool], float],
    *,
    kind: Callable[[int], Hashable] = lambda number: 0,
    disturbed: Callable[[int], bool] = lambda number: False,
    most: float = 60.0,
) -> tuple[Harm | None, float]:
    """What is told of a job whose steps take so many seconds, by the time and by whether others
    are held; and after how many seconds."""
    alternation = Alternation(TOLERANCE)
    now, number = 0.0, 0
    while now < most and alternation.harm is None:
        took = seconds(now, alternation.holds)
        alternation.note(kind(number), took, 1, disturbed=disturbed(number))
        now, number = now + took, number + 1
    return alternation.harm, now


@settings(max_examples=30, deadline=None)
@given(step=st.floats(1e-4, 0.02), harm=st.floats(0.0, 0.3), noise=st.floats(0.0, 0.1), seed=seeds)
def test_what_is_told_is_the_harm(step: float, harm: float, noise: float, seed: int) -> None:
    random = np.random.default_rng(seed)

    def seconds(_: float, alone: bool) -> float:
        return float(step * (1 if alone else 1 + harm) * np.exp(noise * random.normal()))

    found, _ = compared(seconds)
    assert found is not None
    assert abs(found.slowdown - harm) < 6 * found.error + 0.002


@settings(max_examples=20, deadline=None)
@given(seed=seeds, swing=st.floats(0.1, 0.5), period=st.floats(1.0, 10.0))
def test_a_machine_that_wanders_is_nobodys_harm(seed: int, swing: float, period: float) -> None:
    random = np.random.default_rng(seed)

    def seconds(now: float, _: bool) -> float:
        wander = 1 + swing * np.sin(2 * np.pi * now / period)
        return float(0.001 * wander * np.exp(0.05 * random.normal()))

    found, _ = compared(seconds)
    assert found is not None
    assert abs(found.slowdown) < 5 * found.error + 0.002


def test_great_harm_is_told_at_once_and_little_with_care() -> None:
    random = np.random.default_rng(0)

    def harmed(harm: float) -> Any:
        def seconds(_: float, alone: bool) -> float:
            return float(0.002 * (1 if alone else 1 + harm) * np.exp(0.08 * random.normal()))

        return seconds

    _, soon = compared(harmed(0.3))
    _, late = compared(harmed(0.0))
    assert soon < 0.4 < late < 5.0


def test_only_equal_kinds_are_compared() -> None:
    """Steps of two kinds in turns of their own: what one takes says nothing of the other."""
    long = {True: 0.02, False: 0.04}

    def seconds(now: float, alone: bool) -> float:
        return long[now % 1 < 0.5]

    def run(kinds: bool) -> Harm | None:
        alternation, now = Alternation(TOLERANCE), 0.0
        while alternation.harm is None and now < 60:
            took = seconds(now, alternation.holds)
            alternation.note(took if kinds else 0, took, 1)
            now += took
        return alternation.harm

    assert run(kinds=True) == Harm(0.0, 0.0)


def test_a_pause_of_the_process_is_not_taken_for_harm() -> None:
    """Once in a while a step takes a hundred times as long, whoever is beside it."""
    random = np.random.default_rng(1)

    def seconds(_: float, alone: bool) -> float:
        return 0.2 if random.random() < 0.01 else float(0.002 * np.exp(0.02 * random.normal()))

    found, _ = compared(seconds)
    assert found is not None
    assert found.slowdown < TOLERANCE + 3 * found.error


def test_time_alone_that_was_not_does_not_count() -> None:
    """Others' eager steps that were under way went on while they were to be held."""

    def seconds(_: float, alone: bool) -> float:
        return 0.002

    alternation = Alternation(TOLERANCE)
    for _ in range(1000):
        alternation.note(0, 0.002, 1, disturbed=True)
    assert alternation.holds
    found, _ = compared(seconds, disturbed=lambda number: number % 2 == 0)
    assert found == Harm(0.0, 0.0)


@pytest.mark.parametrize("batches", [7, 16, 25])
@pytest.mark.parametrize("step", [0.0012, 0.0027, 0.006])
def test_epochs_that_keep_step_with_turns_are_no_harm(batches: int, step: float) -> None:
    """Stretches end by the clock or with an epoch, and the one that begins an epoch takes longer:
    turns of a few stretches have regular shares of them, other ones alone than beside others."""
    random = np.random.default_rng(0)
    done, found = 0, []
    for _ in range(8):
        alternation = Alternation(TOLERANCE)
        while alternation.harm is None:
            took, made, begins = 0.0001, 0, done == 0
            while took < 0.016 and (done or not made):
                took += step * np.exp(0.03 * random.normal()) + 0.003 * (done == 0)
                done, made = (done + 1) % batches, made + 1
            alternation.note(begins, took, made)
        found.append(alternation.harm.slowdown)
    assert abs(np.mean(found)) < 0.01
