"""pair: pairs that fit, the best first."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import waterflow as wf
from tests.support.zoo_jobs import BERT, LSTM, TABLE, jobs_of

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("kept_captures")]


def test_pairs_are_ranked_by_predicted_speed():
    pairs = wf.pair([BERT, LSTM, TABLE], "64MiB")
    assert {pair.places for pair in pairs} == {(0, 1), (0, 2), (1, 2)}
    speeds = [pair.speed for pair in pairs]
    assert speeds == sorted(speeds, reverse=True)
    assert all(pair.outlook.peak_bytes <= 64 << 20 for pair in pairs)
    assert all(min(pair.batch) >= 1 for pair in pairs)


def test_a_pair_of_fixed_jobs_keeps_their_batches():
    (pair,) = wf.pair(jobs_of(BERT, LSTM), "64MiB")
    assert pair.batch == (None, None)
    assert 1.0 <= pair.speed <= 2.0 + 1e-6


def test_jobs_that_leave_no_room_for_each_other_are_no_pair():
    jobs = jobs_of(BERT, BERT)
    needed = wf.plan(jobs, "1GiB").jobs[0].solo_bytes
    assert wf.pair(jobs, needed) == []


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (lambda: wf.pair([BERT], "1GiB"), wf.JobError, "at least two candidates"),
        (lambda: wf.pair(jobs_of(BERT, LSTM), "10KiB"), wf.BudgetError, "it needs"),
    ],
)
def test_wrong_input_is_told_clearly(ask: Callable[[], object], error, message):
    with pytest.raises(error, match=message):
        ask()
