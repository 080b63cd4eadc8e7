import pytest

from tests.support.plans import named
from waterflow.common.errors import BudgetError
from waterflow.partitioner.policies import Flow, Temporal
from waterflow.partitioner.policies.fair_share import Share
from waterflow.partitioner.testing import triangle

pytestmark = pytest.mark.virtual


def test_what_cannot_flow_goes_one_after_another():
    jobs = named(triangle(2), triangle(4), triangle(3))
    schedule = Flow().schedule(jobs, 100)
    assert schedule.policy == "flow"
    assert schedule.pairs == Temporal().schedule(jobs, 100).pairs
    with pytest.raises(BudgetError):
        Flow().schedule(jobs, 3)


def test_lanes_take_steps_at_their_own_pace_and_by_weight():
    assert Flow.flows
    assert not Temporal.flows
    shares = [Share(1.0, 5.0), Share(2.0, 3.0), Share(1.0, 4.0)]
    assert Flow().next_job(shares) == 1
