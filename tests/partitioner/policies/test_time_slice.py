"""Whose turn it is: by priority, then by time in memory."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import waterflow as wf
from waterflow.partitioner.policies import TimeSlice
from waterflow.partitioner.policies.fair_share import Priority, Share, next_residents

pytestmark = pytest.mark.virtual


def turns(weights: list[float], sizes: list[int], memory: int, count: int) -> list[list[int]]:
    """So many turns of jobs that are there all the time."""
    shares, made = [Share(weight) for weight in weights], []
    for _ in range(count):
        chosen = next_residents(shares, lambda places: sum(sizes[i] for i in places) <= memory)
        for place in chosen:
            shares[place] = shares[place].after(1.0)
        made.append(chosen)
    return made


def test_six_equal_jobs_in_room_for_four_have_four_sixths_each() -> None:
    made = turns([1.0] * 6, [1] * 6, 4, 30)
    assert all(len(chosen) == 4 for chosen in made)
    assert Counter(place for chosen in made for place in chosen) == dict.fromkeys(range(6), 20)


def test_time_is_by_weight() -> None:
    counted = Counter(place for chosen in turns([3, 1], [1, 1], 1, 400) for place in chosen)
    assert counted[0] == 300


@given(
    sizes=st.lists(st.integers(1, 10), min_size=1, max_size=8),
    data=st.data(),
)
def test_nobody_starves_and_memory_holds(sizes: list[int], data: st.DataObject) -> None:
    memory = data.draw(st.integers(max(sizes), sum(sizes)))
    made = turns([1.0] * len(sizes), sizes, memory, 4 * len(sizes))
    assert all(sum(sizes[i] for i in chosen) <= memory for chosen in made)
    assert {place for chosen in made for place in chosen} == set(range(len(sizes)))


def test_whoever_goes_first_stays() -> None:
    shares = [Share(1, 5.0, Priority.NORMAL), Share(1, 100.0, Priority.GUARANTEED)]
    assert next_residents(shares, lambda places: len(places) <= 1) == [1]


@pytest.mark.parametrize("quantum", [0, -1, float("inf"), "soon", "5 parsecs", None])
def test_a_quantum_that_is_none(quantum: Any) -> None:
    with pytest.raises(wf.JobError, match=r"time"):
        TimeSlice(quantum)


def test_quanta_as_people_write_them() -> None:
    assert [TimeSlice(q).quantum for q in (2, "250ms", "30s", "5min")] == [2.0, 0.25, 30.0, 300.0]
