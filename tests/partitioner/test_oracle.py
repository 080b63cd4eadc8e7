import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from waterflow.common.errors import PlanError
from waterflow.partitioner import GroupRef, NodeGroup, Schedule, verify
from waterflow.partitioner.policies import WaterWave
from waterflow.partitioner.testing import plan_jobs, step_profile

pytestmark = pytest.mark.virtual

# Two jobs: up by 10, then down, with 2 of workspace on the way down.
PROFILES = [step_profile([[10], [2, -2, -10]], persistent=held) for held in (5, 6)]
A0, A1, B0, B1 = GroupRef(0, 0), GroupRef(0, 1), GroupRef(1, 0), GroupRef(1, 1)
# The oracle must not believe the sums in the groups, so they are wrong here.
GROUPS = (NodeGroup(0, 1, 77, 77, 0.0), NodeGroup(1, 2, 77, 77, 0.0))
PEAK = 5 + 6 + 10 + 2 + 10


def schedule(*pairs, peak_bytes=PEAK, groups=(GROUPS, GROUPS), lanes=2):
    return Schedule("test", lanes, groups, pairs, peak_bytes)


GOOD = schedule((A0, None), (A1, B0), (B1, None))


def test_a_right_schedule_passes():
    verify(GOOD, PROFILES, PEAK)
    verify(GOOD, PROFILES, 10 * PEAK)
    serial = ((A0,), (A1,), (B0,), (B1,))
    verify(schedule(*serial, lanes=1, peak_bytes=23), PROFILES, 23)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (schedule((A1, None), (A0, B0), (B1, None)), "runs group 1 of job 0, its next is 0"),
        (schedule((A0, None), (A1, B0)), "runs 1 groups of job 1, its step has 2"),
        (schedule((A0, None), (A1, B0), (B1, A1)), "runs group 1 of job 0, its next is 2"),
        (schedule((A0, None), (A1, B0), (B1, GroupRef(0, 2))), "it has only 2"),
        (schedule((A0, A1), (B0, None), (B1, None)), "two groups of one job side by side"),
        (schedule((A0, None), (None, None), (A1, B0), (B1, None)), "no work"),
        (schedule((A0,), (A1, B0), (B1, None)), "1 places, the schedule has 2 lanes"),
        (schedule((A0, GroupRef(2, 0)), (A1, B0), (B1, None)), "job 2, which does not exist"),
        (schedule((A0, GroupRef(-1, 0)), (A1, B0), (B1, None)), "job -1, which does not exist"),
        (schedule(lanes=0), "at least one lane"),
        (dataclasses.replace(GOOD, peak_bytes=PEAK - 1), "its replay peaks at 33"),
        (dataclasses.replace(GOOD, peak_bytes=PEAK + 1), "its replay peaks at 33"),
        (dataclasses.replace(GOOD, groups=(GROUPS,)), "groups of 1 jobs, there are 2"),
        (dataclasses.replace(GOOD, groups=(GROUPS, GROUPS[:1])), "end at node 1"),
        (dataclasses.replace(GOOD, groups=(GROUPS, GROUPS[1:])), "non-empty range from 0"),
    ],
)
def test_a_broken_schedule_is_refused(broken, message):
    with pytest.raises(PlanError, match=message):
        verify(broken, PROFILES, 1000)


def test_the_budget_is_checked():
    with pytest.raises(PlanError, match="peaks at 33 bytes, the budget is 32"):
        verify(GOOD, PROFILES, PEAK - 1)


@settings(deadline=None)
@given(jobs=plan_jobs(max_jobs=3), data=st.data())
def test_any_lost_doubled_or_swapped_group_is_noticed(jobs, data):
    plan = WaterWave(split_size=20).schedule(jobs, 10**6)
    own = [job.profile for job in jobs]
    verify(plan, own, 10**6)
    at = data.draw(st.integers(0, len(plan.pairs) - 1))
    pairs = list(plan.pairs)
    kind = data.draw(st.sampled_from(["drop", "double", "swap"]))
    if kind == "drop":
        del pairs[at]
    elif kind == "double":
        pairs.insert(at, pairs[at])
    else:
        other = data.draw(st.integers(0, len(plan.pairs) - 1))
        pairs[at], pairs[other] = pairs[other], pairs[at]
        jobs_of = [{ref.job for ref in pair if ref} for pair in plan.pairs[min(at, other) :]]
        if at == other or not jobs_of[0] & jobs_of[abs(at - other)]:
            return  # such a swap keeps the order of every job
    with pytest.raises(PlanError):
        verify(dataclasses.replace(plan, pairs=tuple(pairs)), own, 10**6)
