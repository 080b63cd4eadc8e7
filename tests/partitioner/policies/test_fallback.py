import itertools

import pytest

from waterflow.partitioner import PlanJob
from waterflow.partitioner.policies import Flow, WaterWave
from waterflow.partitioner.policies.base import temporal_need
from waterflow.partitioner.policies.fallback import schedules_to_try
from waterflow.partitioner.testing import triangle

pytestmark = pytest.mark.virtual

JOBS = [PlanJob("first", triangle(4, 10)), PlanJob("second", triangle(4, 10))]
NEEDED = temporal_need([job.profile for job in JOBS])


def test_the_boldest_schedule_comes_first_and_none_exceeds_the_budget():
    budget = 2 * NEEDED
    tried = list(schedules_to_try(WaterWave(), JOBS, budget, 2))
    assert tried[0] == WaterWave().schedule(JOBS, budget, 2)
    assert len(tried) > 2
    peaks = [schedule.peak_bytes for schedule in tried]
    assert max(peaks) == peaks[0] <= budget


def test_the_last_is_one_job_after_another():
    *_, last = schedules_to_try(WaterWave(), JOBS, NEEDED, 2)
    assert last.policy == "temporal"
    assert last.peak_bytes == NEEDED
    assert all(pair[1] is None for pair in last.pairs)


def test_a_tighter_budget_that_nothing_fits_ends_the_search_with_the_safest():
    # Under 98 % of it not even one after another fits: the policy's own, then temporal order.
    tried = list(schedules_to_try(Flow(), JOBS, NEEDED, 2))
    assert [schedule.policy for schedule in tried] == ["flow", "temporal"]


def test_the_published_form_keeps_to_itself():
    # Side by side they fit neither this nor any smaller budget.
    assert list(schedules_to_try(WaterWave(published=True), JOBS, NEEDED, 2)) == []
    tried = list(schedules_to_try(WaterWave(published=True), JOBS, 2 * NEEDED, 2))
    assert {schedule.policy for schedule in tried} == {"waterwave"}


def test_nothing_fits_and_nothing_is_tried():
    assert list(schedules_to_try(WaterWave(), JOBS, NEEDED - 1, 2)) == []


def test_a_schedule_is_made_only_when_it_is_asked_for():
    class Counting(WaterWave):
        made = 0

        def schedule(self, jobs, budget, lanes=2):
            self.made += 1
            return super().schedule(jobs, budget, lanes)

    policy = Counting()
    assert len(list(itertools.islice(schedules_to_try(policy, JOBS, 2 * NEEDED, 2), 1))) == 1
    assert policy.made == 1
