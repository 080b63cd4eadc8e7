"""Flowing by the clock: cases worked out by hand, and the rules of lanes and memory for others."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from waterflow.executor.plan.flow_plan import most_together
from waterflow.executor.plan.piled_step import PiledStep, pile_step
from waterflow.executor.plan.simulate import FlowForecast, SimulatedSpan, simulate_flow
from waterflow.executor.plan.step_memory import StepMemory
from waterflow.partitioner.policies.fair_share import Priority
from waterflow.partitioner.profile import Profile, node_times
from waterflow.partitioner.testing import profiles, triangle

pytestmark = pytest.mark.virtual

UNIT = 64
AMPLE = 1 << 30


def rise_and_fall(half: int, node_seconds: float = 1.0) -> Profile:
    """Rises by a unit a node to `half` units, and falls again."""
    return triangle(half, UNIT, node_seconds=node_seconds)


def pile(profile: Profile) -> PiledStep:
    return pile_step(StepMemory(profile, UNIT), 0.0, AMPLE)


def simulate(
    own: Sequence[Profile], memory: int, lanes: int = 2, weights: Sequence[float] | None = None
) -> FlowForecast:
    return simulate_flow([pile(p) for p in own], node_times(own), memory, lanes, weights)


def steps_ended(forecast: FlowForecast, own: Sequence[Profile]) -> list[int]:
    last = [len(pile(profile).groups) - 1 for profile in own]
    return [
        sum(span.job == job and span.group == group for span in forecast.spans)
        for job, group in enumerate(last)
    ]


def speeds(
    own: Sequence[Profile], priorities: Sequence[Priority], lanes: int = 2
) -> tuple[float, ...]:
    piled = [pile(profile) for profile in own]
    memory = 100 * sum(piled_step.extent for piled_step in piled)
    times = node_times(own)
    return simulate_flow(piled, times, memory, lanes, priorities=priorities).speeds


# By hand


def test_two_equal_jobs_with_memory_for_both_take_half_the_time() -> None:
    """20 s each: both at once, all the time."""
    forecast = simulate([rise_and_fall(10)] * 2, 20 * UNIT)
    assert forecast.seconds == pytest.approx(20.0)
    assert forecast.overlap == 1.0
    assert forecast.waits == 0.0


def test_two_equal_jobs_with_memory_for_one_peak() -> None:
    """The second may rise to i units while the first has fallen to 10 - i. It starts a group late,
    since a group holds until its end what it frees; its own top (10 of 10 units) needs the first to
    be gone; and the first starts again when the second has freed its first unit. So in 22 s there
    are 20 s of each, 18 s of both."""
    forecast = simulate([rise_and_fall(10)] * 2, 10 * UNIT)
    assert forecast.seconds == pytest.approx(22.0)
    assert forecast.overlap == pytest.approx(18 / 22)
    assert forecast.waits > 0


def test_a_lane_is_kept_for_a_guaranteed_job() -> None:
    """Of three jobs on two lanes one has a lane of its own, and two share what is left."""
    own = [rise_and_fall(10)] * 3
    first, *others = speeds(own, [Priority.GUARANTEED, Priority.NORMAL, Priority.NORMAL])
    assert first == pytest.approx(1.0)
    assert others == pytest.approx([0.5, 0.5], abs=0.1)
    assert speeds(own, [Priority.NORMAL] * 3) == pytest.approx((2 / 3,) * 3, abs=0.1)


def test_who_goes_last_gets_nothing_where_others_are_always_ready() -> None:
    own = [rise_and_fall(10)] * 3
    ranks = [Priority.OPPORTUNISTIC, Priority.NORMAL, Priority.NORMAL]
    assert speeds(own, ranks) == pytest.approx((0.0, 1.0, 1.0))
    ranks = [Priority.GUARANTEED, Priority.OPPORTUNISTIC]
    assert speeds(own[:2], ranks, lanes=1) == pytest.approx((1.0, 0.0))


def test_half_a_peak_more_is_enough_for_jobs_out_of_step() -> None:
    """Half a step apart the two never reach further than 11 units together."""
    forecast = simulate([rise_and_fall(10)] * 2, 15 * UNIT)
    assert forecast.seconds == pytest.approx(20.0)
    assert forecast.overlap == 1.0


def test_flat_steps_in_memory_for_one_take_turns() -> None:
    """Their one group needs all memory: no overlap, whatever the lanes."""
    own = [rise_and_fall(1)] * 3
    forecast = simulate(own, UNIT, lanes=2)
    assert forecast.seconds == pytest.approx(6.0)
    assert forecast.overlap == 0.0


@pytest.mark.parametrize("halves", [[10], [10, 10], [4, 10, 25]])
def test_one_lane_is_one_after_another(halves: list[int]) -> None:
    forecast = simulate([rise_and_fall(half) for half in halves], 100 * UNIT, lanes=1)
    assert forecast.seconds == pytest.approx(2 * sum(halves))
    assert forecast.overlap == 0.0


@pytest.mark.parametrize(("lanes", "seconds"), [(2, 30.0), (3, 20.0), (4, 20.0)])
def test_three_equal_jobs(lanes: int, seconds: float) -> None:
    """20 s each; on two lanes each of them pauses a third of the time."""
    forecast = simulate([rise_and_fall(10)] * 3, 40 * UNIT, lanes)
    assert forecast.seconds == pytest.approx(seconds)
    assert forecast.overlap == 1.0


@pytest.mark.parametrize(("long", "short"), [(10, 10), (30, 10), (10, 30)])
def test_weights_share_the_time_of_a_lane(long: int, short: int) -> None:
    """3 : 1 of one lane's time, so that many more steps by so much shorter ones."""
    own = [rise_and_fall(long), rise_and_fall(short)]
    forecast = simulate(own, 100 * UNIT, lanes=1, weights=[3.0, 1.0])
    first, second = steps_ended(forecast, own)
    assert first / second == pytest.approx(3 * short / long, rel=0.2)
    assert forecast.seconds == pytest.approx(2 * (long + short))


def test_jobs_of_the_same_weight_share_alike_whatever_their_steps() -> None:
    own = [rise_and_fall(5), rise_and_fall(50)]
    first, second = steps_ended(simulate(own, 100 * UNIT, lanes=1), own)
    assert first / second == pytest.approx(10, rel=0.2)


def test_a_step_beside_one_a_thousand_times_as_long() -> None:
    """The short job alone makes more groups than are simulated before the long one is done."""
    own = [rise_and_fall(10), rise_and_fall(100, node_seconds=100.0)]
    forecast = simulate(own, 300 * UNIT)
    assert forecast.seconds == pytest.approx((20 + 20_000) / 2, rel=0.02)
    assert forecast.overlap == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("lanes", "units", "most"),
    [(1, 100, 10), (2, 10, 10), (2, 15, 15), (2, 100, 20), (3, 100, 30), (4, 100, 40)],
)
def test_the_most_that_four_equal_jobs_reach(lanes: int, units: int, most: int) -> None:
    assert most_together([pile(rise_and_fall(10))] * 4, units * UNIT, lanes) == most * UNIT


# In general


def check_lanes(spans: Sequence[SimulatedSpan], piled: Sequence[PiledStep]) -> None:
    """A lane does one group at a time, a job's groups follow each other on one lane a step."""
    for lane in {span.lane for span in spans}:
        mine = [span for span in spans if span.lane == lane]
        assert all(a.stop <= b.start for a, b in itertools.pairwise(mine))
    for job, step in enumerate(piled):
        mine = [span for span in spans if span.job == job]
        assert [span.group for span in mine] == [i % len(step.groups) for i in range(len(mine))]
        for a, b in itertools.pairwise(mine):
            assert a.stop <= b.start
            assert a.lane == b.lane or b.group == 0


def most_held(spans: Sequence[SimulatedSpan], piled: Sequence[PiledStep]) -> dict[int, int]:
    """The most that the piles of each two lanes reach together, by the spans alone."""
    most: dict[int, int] = {}
    held: dict[int, int] = {}  # by lane
    # At one moment groups end before others begin.
    moments = [(span.stop, 0, span) for span in spans] + [(span.start, 1, span) for span in spans]
    for _, begins, span in sorted(moments, key=lambda moment: moment[:2]):
        demand = piled[span.job].demand
        held[span.lane] = demand.during[span.group] if begins else demand.after[span.group + 1]
        both = held[span.lane] + held.get(span.lane ^ 1, 0)
        most[span.lane // 2] = max(most.get(span.lane // 2, 0), both)
    return most


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_lanes_and_memory_are_never_given_twice(data: st.DataObject) -> None:
    own = data.draw(st.lists(profiles().filter(is_whole), min_size=1, max_size=4))
    lanes = data.draw(st.integers(1, 4))
    piled = [pile(profile) for profile in own]
    times = [np.maximum(time, 1e-6) for time in node_times(own)]
    tallest = max(step.extent for step in piled)
    memory = tallest + data.draw(st.integers(0, 3 * tallest))
    forecast = simulate_flow(piled, times, memory, lanes)
    spans = forecast.spans
    check_lanes(spans, piled)
    ranges = most_held(spans, piled)
    assert sum(ranges.values()) <= memory
    assert all(held <= memory // len(ranges) for held in ranges.values())
    assert sum(ranges.values()) <= most_together(piled, memory, lanes) <= memory
    assert {span.job for span in spans} == set(range(len(own)))
    assert 0.0 <= forecast.overlap <= 1.0
    serial = sum(float(time.sum()) for time in times)
    assert forecast.seconds <= serial * 1.2, "some lane works all the time"
    assert forecast == simulate_flow(piled, times, memory, lanes), "two simulations, two forecasts"


def is_whole(profile: Profile) -> bool:
    return profile.transient_peak_bytes > 0 and profile.surviving_bytes == 0
