"""The feedback rule of the coordinator: it protects, it converges, it does not flap."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from waterflow.partitioner.policies.coordinator import TOLERANCE, Pace, next_pace, settled_duty

pytestmark = pytest.mark.virtual

shares = st.floats(0.0, 1.0)


@given(harm=st.floats(0.001, 5.0), power=st.floats(0.5, 3.0))
def test_it_comes_to_rest_near_the_largest_duty_without_harm(harm: float, power: float) -> None:
    def slowdown(duty: float) -> float:
        return harm * duty**power

    best = min(1.0, (TOLERANCE / harm) ** (1 / power))
    found = settled_duty(slowdown)
    assert slowdown(found) <= TOLERANCE
    assert found >= best - max(0.03, best / 5)


@given(duty=shares, harmless=shares, slowdown=st.floats(0.0101, 10.0))
def test_harm_is_cut_at_once_and_by_much(duty: float, harmless: float, slowdown: float) -> None:
    pace = Pace(duty, min(duty, harmless))
    after = next_pace(pace, slowdown)
    assert after.duty <= max(duty / 2, min(duty, harmless) if harmless < duty else 0.0)
    assert after.duty < duty or duty == 0.0


@given(slowdown=st.floats(0.02, 10.0), pace=st.builds(Pace, shares, shares, shares))
def test_others_stop_altogether_where_they_never_cease_to_harm(slowdown: float, pace: Pace) -> None:
    for _ in range(40):
        pace = next_pace(pace, slowdown)
    assert pace.duty == 0.0


@given(seed=st.integers(0, 2**32 - 1), harm=st.floats(0.02, 1.0))
def test_noise_does_not_make_it_flap(seed: int, harm: float) -> None:
    """Windows with errors as large as the tolerance: it moves by little that matters, and does no
    harm all the while."""
    random = np.random.default_rng(seed)
    pace, duties = Pace(), []
    for _ in range(300):
        seen = harm * pace.duty + random.normal(0.0, TOLERANCE)
        pace = next_pace(pace, seen, error=2 * TOLERANCE)
        duties.append(pace.duty)
    late = np.array(duties[150:])
    assert np.abs(np.diff(late)).mean() * harm <= TOLERANCE
    assert np.mean(late) * harm <= 2 * TOLERANCE


@given(slowdowns=st.lists(st.floats(-0.5, 5.0), max_size=60), error=st.floats(0.0, 0.1))
def test_a_duty_is_a_share(slowdowns: list[float], error: float) -> None:
    pace = Pace()
    for slowdown in slowdowns:
        pace = next_pace(pace, slowdown, error)
        assert 0.0 <= pace.harmless <= 1.0
        assert 0.0 <= pace.duty <= 1.0


def test_jobs_that_do_no_harm_are_not_held_back() -> None:
    assert settled_duty(lambda duty: 0.0) == 1.0


def test_a_duty_that_once_did_harm_is_tried_again() -> None:
    pace = next_pace(Pace(), 0.5)
    for _ in range(1000):
        pace = next_pace(pace, 0.0)
    assert pace.duty == 1.0


def test_after_a_burst_of_harm_it_goes_up_again_soon() -> None:
    """Whatever the duty, the machine was slow for a moment, and is not any more."""
    pace = Pace()
    for _ in range(10):
        pace = next_pace(pace, 0.0)
    for _ in range(4):
        pace = next_pace(pace, 0.3)
    assert pace.duty < 0.02
    for _ in range(20):
        pace = next_pace(pace, 0.0)
    assert pace.duty == 1.0


def test_a_duty_that_does_harm_is_tried_ever_more_rarely() -> None:
    pace, harmed = Pace(), []
    for window in range(600):
        slowdown = 0.5 * pace.duty
        if slowdown > TOLERANCE:
            harmed.append(window)
        pace = next_pace(pace, slowdown)
    between = np.diff(harmed[-4:])
    assert between.min() > 60


@pytest.mark.parametrize("bursts", [0.0, 0.05, 0.15])
@pytest.mark.parametrize("harm", [0.0, 0.02, 0.2])
def test_duties_are_near_what_is_tolerated_also_where_the_machine_is_slow_at_times(
    harm: float, bursts: float
) -> None:
    """Errors as those of comparisons, and bursts that no duty explains. Without these the duty is
    near tolerance over harm; with many it is far from the nothing to which they led."""
    least = {0.0: 0.7, 0.05: 0.5, 0.15: 0.25}[bursts]
    means = [_mean_duty(harm, bursts, seed) for seed in range(20)]
    best = min(1.0, TOLERANCE / harm) if harm else 1.0
    assert np.mean(means) >= least * best
    assert np.mean(means) * harm <= 1.05 * TOLERANCE


def _mean_duty(harm: float, bursts: float, seed: int) -> float:
    """Of 200 windows, but for the first."""
    random = np.random.default_rng(seed)
    pace, burst, duties = Pace(), 0.0, []
    for _ in range(200):
        if random.random() < 0.5:
            burst = 0.0
        if random.random() < bursts:
            burst = random.uniform(0.03, 0.1)
        duties.append(pace.duty)
        seen = harm * pace.duty + burst + random.normal(0.0, 0.009)
        pace = next_pace(pace, seen, error=0.01)
    return float(np.mean(duties[15:]))


def test_a_duty_is_left_for_one_window_of_harm_and_comes_back() -> None:
    pace = Pace(0.75, harmless=0.75, harmful=1.0, failures=1)
    pace = next_pace(pace, 0.5)
    assert pace.duty == 0.375
    for _ in range(2):
        pace = next_pace(pace, 0.0)
    assert pace.duty == 0.75


def test_a_duty_that_is_tried_again_is_known_to_be_harmless_after_two_calm_windows() -> None:
    pace = Pace(0.25, harmless=0.25, harmful=0.25)
    for _ in range(2):
        pace = next_pace(pace, 0.0)
    assert pace.duty == 0.5


def test_windows_that_tell_little_by_themselves_tell_enough_together() -> None:
    """Two that are one error above what is tolerated; one that is one and a half above."""
    pace = next_pace(Pace(0.5, harmless=0.25), 0.02, error=0.01)
    assert pace.duty == 0.5
    assert next_pace(pace, 0.02, error=0.01).duty == 0.25
    assert next_pace(Pace(0.5, harmless=0.25), 0.0251, error=0.01).duty == 0.25


def test_after_a_burst_the_duty_that_did_no_harm_before_it_is_tried_again() -> None:
    """However far it led down: the first cut of a series is what is tried, after eight windows."""
    pace = Pace(0.5, harmless=0.5)
    for _ in range(6):
        pace = next_pace(pace, 0.4, error=0.02)
    assert pace.duty == 0.0
    windows = 0
    while pace.duty < 0.5:
        pace, windows = next_pace(pace, 0.0), windows + 1
    assert windows <= 8


def test_doubt_is_forgotten_in_calm_windows() -> None:
    pace = Pace(0.5, harmless=0.25, harmful=0.6)
    for _ in range(20):
        pace = next_pace(pace, 0.02, error=0.01)
        pace = next_pace(pace, 0.0, error=0.01)
    assert pace.duty >= 0.5


@pytest.mark.parametrize("error", [0.0, 0.01])
def test_whoever_tolerates_all_harm_holds_nobody_back(error: float) -> None:
    pace = Pace()
    for _ in range(3):
        pace = next_pace(pace, 0.9, error, tolerance=math.inf)
    assert pace.duty == 1.0
