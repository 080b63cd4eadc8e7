"""What all policies promise of requests that cannot be served."""

import pytest

from tests.support.plans import named
from waterflow.common.errors import BudgetError, JobError
from waterflow.partitioner import POLICIES, PlanJob, get_policy, verify
from waterflow.partitioner.policies import Temporal
from waterflow.partitioner.policies.base import temporal_need
from waterflow.partitioner.testing import step_profile, triangle

pytestmark = pytest.mark.virtual


def test_survivors_need_memory_in_the_order_given():
    # Fits only in the order given: the first job's survivors are small, the second's large.
    first = step_profile([[90], [-90], [1]])
    second = step_profile([[50], [40], [-40]])
    jobs = named(first, second)
    assert temporal_need([first, second]) == 91
    assert temporal_need([second, first]) == 140
    for name in POLICIES:
        verify(get_policy(name).schedule(jobs, 91), [first, second], 91)


def test_the_budget_error_says_what_each_job_needs_and_what_fits():
    jobs = named(triangle(2, 10, persistent=5), triangle(90, 10, persistent=7), triangle(3, 10))
    with pytest.raises(BudgetError) as caught:
        Temporal().schedule(jobs, 100)
    assert str(caught.value).splitlines() == [
        "the jobs do not fit 100 B (100 bytes) even one after another; each needs:",
        "  job-0: 5 B held all the time + 20 B at the peak of its step",
        "  job-1: 7 B held all the time + 900 B at the peak of its step",
        "  job-2: 0 B held all the time + 30 B at the peak of its step",
        "one after another, 3 jobs need 912 B (912 bytes)",
        "in this budget would fit: job-0, job-2",
    ]
    with pytest.raises(BudgetError, match="none of them fits"):
        Temporal().schedule(jobs, 10)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_wrong_requests_are_refused(name):
    with pytest.raises(JobError, match="no jobs"):
        get_policy(name).schedule([], 100)
    with pytest.raises(JobError, match="lanes is 0"):
        get_policy(name).schedule(named(triangle(2)), 100, lanes=0)


def test_a_boundary_outside_the_step_is_refused():
    with pytest.raises(JobError, match="boundary 9"):
        PlanJob("a", triangle(2), 9)
