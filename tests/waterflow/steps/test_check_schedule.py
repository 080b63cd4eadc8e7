"""When captured steps are checked, beside their first use."""

import contextlib

import pytest

from waterflow.steps import check_schedule
from waterflow.steps.check_schedule import CheckSchedule

pytestmark = pytest.mark.virtual


def test_checks_that_cost_much_wait_until_their_share_is_earned(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(check_schedule.time, "perf_counter", lambda: now[0])
    schedule, checked = CheckSchedule("log"), []
    for step in range(1, 20_001):
        if schedule.is_due(step, 0.001):
            checked.append(step)
            with schedule.timed(step):
                now[0] += 0.021  # twenty steps more than the captured step
    assert len(checked) * 20 <= 0.01 * 20_000
    assert checked == [1, 4000, 6000, 8192, 16384]


@pytest.mark.parametrize(
    ("steps", "expected"), [(40, [1]), (130, [1, 2]), (400, [1, 2, 4, 8, 16, 32])]
)
def test_checks_of_few_steps_take_a_share_of_them(monkeypatch, steps, expected):
    now = [0.0]
    monkeypatch.setattr(check_schedule.time, "perf_counter", lambda: now[0])
    schedule, checked = CheckSchedule("log", steps), []
    for step in range(1, steps + 1):
        if schedule.is_due(step, 0.03):
            checked.append(step)
            with schedule.timed(step):
                now[0] += 0.078
    assert checked == expected


def due(audit, steps=16):
    """The steps that are checked, where a check costs next to nothing."""
    schedule, checked = CheckSchedule(audit), []
    for step in range(1, steps + 1):
        if schedule.is_due(step, 1.0):
            checked.append(step)
            with schedule.timed(step):
                pass
    return checked


def test_what_costs_little_is_checked_at_powers_of_two():
    assert due("log") == [1, 2, 4, 8, 16]


def test_all_steps_or_none():
    assert due("all") == list(range(1, 17))
    assert due("off") == []
    assert CheckSchedule("all").compares
    assert not CheckSchedule("off").compares


def test_a_check_that_fails_counts_all_the_same(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(check_schedule.time, "perf_counter", lambda: now[0])
    schedule = CheckSchedule("log")
    assert schedule.is_due(1, 0.001)
    with contextlib.suppress(RuntimeError), schedule.timed(1):
        now[0] += 60.0
        raise RuntimeError
    assert not schedule.is_due(2, 0.001)
