"""Who runs next: everybody has their due, by weight, and newcomers neither starve nor take over."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waterflow.partitioner.policies import POLICIES
from waterflow.partitioner.policies.fair_share import Share, fair_share, newcomer

pytestmark = pytest.mark.virtual

WEIGHTS = st.lists(st.floats(0.1, 10), min_size=1, max_size=6)


def served(weights: list[float], costs: list[float], rounds: int) -> list[float]:
    """Seconds of lanes that each job has had after so many steps of one lane."""
    shares = [Share(weight) for weight in weights]
    seconds = [0.0] * len(weights)
    for _ in range(rounds):
        place = fair_share(shares)
        shares[place] = shares[place].after(costs[place])
        seconds[place] += costs[place]
    return seconds


def test_the_one_with_the_least_runs_and_of_equals_the_first() -> None:
    assert fair_share([Share(1.0, 3.0), Share(1.0, 2.0), Share(1.0, 2.0)]) == 1
    assert fair_share([Share()]) == 0


def test_twice_the_weight_is_twice_the_time() -> None:
    seconds = served([2.0, 1.0], [1.0, 1.0], 300)
    assert seconds == [200.0, 100.0]


@given(WEIGHTS, st.data())
def test_shares_differ_by_one_step_at_most(weights: list[float], data: st.DataObject) -> None:
    costs = data.draw(
        st.lists(st.floats(0.01, 5), min_size=len(weights), max_size=len(weights)), label="costs"
    )
    seconds = served(weights, costs, 200)
    used = [time / weight for time, weight in zip(seconds, weights, strict=True)]
    largest = max(cost / weight for cost, weight in zip(costs, weights, strict=True))
    assert max(used) - min(used) <= largest * (1 + 1e-9)


@given(st.lists(st.builds(Share, st.floats(0.1, 10), st.floats(0, 100)), max_size=5))
def test_a_newcomer_stands_where_the_least_served_one_does(others: list[Share]) -> None:
    share = newcomer(2.0, others)
    assert share.weight == 2.0
    assert share.used == min((other.used for other in others), default=0.0)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_says_who_runs_next(name: str) -> None:
    assert POLICIES[name]().next_job([Share(1.0, 2.0), Share(1.0, 1.0)]) == 1
