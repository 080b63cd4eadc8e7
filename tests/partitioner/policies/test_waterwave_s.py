import pytest

from tests.support.plans import named
from waterflow.partitioner import PlanJob, verify
from waterflow.partitioner.policies import WaterWave, WaterWaveS
from waterflow.partitioner.testing import step_profile, triangle

pytestmark = pytest.mark.virtual


def test_fine_groups_share_where_two_groups_cannot():
    jobs = named(triangle(64, 10), triangle(64, 10))
    own = [job.profile for job in jobs]
    assert WaterWaveS().schedule(jobs, 832).overlap(own) == 0
    assert WaterWave().schedule(jobs, 832).overlap(own) > 0.2


def test_waterwave_s_takes_the_better_cut():
    # A large temporary in backward is the peak; cut before it, half as much is held meanwhile.
    profile = step_profile([[10], [20], [-20, -10]], seconds=[1, 1, 1])
    for boundary, seconds in ((None, 6), (1, 5)):
        schedule = WaterWaveS().schedule([PlanJob("a", profile, boundary)] * 2, 40)
        verify(schedule, [profile] * 2, 40)
        assert schedule.predicted_seconds([profile] * 2) == seconds
