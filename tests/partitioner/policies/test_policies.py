"""The contract, on every policy that has a name."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from waterflow.common.errors import JobError
from waterflow.partitioner import POLICIES, get_policy, node_times
from waterflow.partitioner.policies import WaterWave
from waterflow.partitioner.testing import check_contract, plan_jobs

pytestmark = pytest.mark.virtual


@pytest.mark.parametrize("name", sorted(POLICIES))
@settings(deadline=None, max_examples=100)
@given(
    jobs=plan_jobs(),
    lanes=st.integers(1, 4),
    headroom=st.one_of(st.just(0.0), st.floats(0, 1), st.floats(1, 7)),
)
def test_contract(name, jobs, lanes, headroom):
    schedule = check_contract(get_policy(name), jobs, lanes, headroom)
    own = [job.profile for job in jobs]
    serial = sum(times.sum() for times in node_times(own))
    assert schedule.predicted_seconds(own) <= serial * (1 + 1e-9)


@settings(deadline=None, max_examples=60)
@given(
    jobs=plan_jobs(), lanes=st.integers(1, 4), split=st.integers(1, 500), headroom=st.floats(0, 3)
)
def test_contract_at_any_split_size(jobs, lanes, split, headroom):
    check_contract(WaterWave(split_size=split), jobs, lanes, headroom)


def test_policies_by_name():
    assert get_policy("waterwave-s").name == "waterwave-s"
    with pytest.raises(JobError, match="did you mean waterwave"):
        get_policy("waterwaves")
    with pytest.raises(JobError, match="temporal or"):
        get_policy("???")
