"""The life of a job: what may follow what, and what users see of it."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waterflow.engine.states import JobState, TransitionError, transition
from waterflow.report.job_report import State

pytestmark = pytest.mark.virtual

LIVES = [
    ["preparing", "running", "finished"],
    ["preparing", "queued", "running", "out_of_memory"],
    ["preparing", "running", "suspended", "resuming", "running", "stopped"],
    ["preparing", "running", "suspended", "resuming", "suspended", "failed"],
    ["preparing", "suspended", "resuming", "finished"],
    ["preparing", "queued", "suspended", "resuming", "running", "finished"],
    ["preparing", "finished"],
    ["stopped"],
    ["failed"],
]


@pytest.mark.parametrize("life", LIVES, ids=" ".join)
def test_lives(life: list[str]) -> None:
    state = JobState.QUEUED
    for word in life:
        assert not state.ended
        state = transition("a", state, JobState(word))
        assert state is JobState(word)
    assert state.ended


@pytest.mark.parametrize("end", [state for state in JobState if state.ended])
@pytest.mark.parametrize("after", list(JobState))
def test_nothing_follows_an_end(end: JobState, after: JobState) -> None:
    with pytest.raises(TransitionError, match=f"'a' is {end.value} and cannot become"):
        transition("a", end, after)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("queued", "finished"),
        ("running", "queued"),
        ("running", "preparing"),
        ("running", "resuming"),
        ("suspended", "running"),
        ("suspended", "finished"),
        ("resuming", "queued"),
    ],
)
def test_what_cannot_be(before: str, after: str) -> None:
    with pytest.raises(TransitionError, match=f"is {before} and cannot become {after}; .* follow"):
        transition("a", JobState(before), JobState(after))


@given(st.lists(st.sampled_from(JobState), max_size=30))
def test_whatever_is_tried_a_job_ends_once_and_runs_only_after_it_was_queued(
    tries: list[JobState],
) -> None:
    state, lived = JobState.QUEUED, [JobState.QUEUED]
    for to in tries:
        try:
            state = transition("a", state, to)
        except TransitionError:
            continue
        lived.append(state)
    assert [one.ended for one in lived[:-1]] == [False] * (len(lived) - 1)
    if JobState.RESUMING in lived:
        assert JobState.SUSPENDED in lived[: lived.index(JobState.RESUMING)]


def test_every_state_has_a_word_that_reports_know() -> None:
    assert {state.status for state in JobState} <= set(get_args(State))
    assert {state.status for state in JobState if state.ended} == {
        "finished",
        "stopped",
        "failed",
        "out_of_memory",
    }
