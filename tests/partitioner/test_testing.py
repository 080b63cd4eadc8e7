"""The contract that policies are held to refuses policies that break it."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings

from tests.support.plans import named
from waterflow.common.errors import BudgetError, PlanError
from waterflow.partitioner.policies import Temporal, WaterWave
from waterflow.partitioner.testing import check_contract, plan_jobs, step_profile, triangle

pytestmark = pytest.mark.virtual

JOBS = named(triangle(4, 10), triangle(3, 10, persistent=5))


def test_profiles_from_literal_lists():
    profile = step_profile([[4], [8], [2, -2, -8], [-4]], seconds=[1, 2, 3, 4], persistent=7)
    assert profile.curve().tolist() == [4, 12, 14, 12, 4, 0]
    assert profile.node_net().tolist() == [4, 8, -8, -4]
    assert (profile.seconds, profile.solo_peak_bytes) == (10.0, 21)
    # Of two blocks of a size the last one goes.
    assert step_profile([[4, 4], [-4]]).events["id"].tolist() == [0, 1, 1]
    with pytest.raises(ValueError, match="node 1 frees 5 bytes"):
        step_profile([[4], [-5]])


def test_a_triangle_rises_and_falls():
    profile = triangle(3, 10, node_seconds=0.5)
    assert profile.node_high().tolist() == [10, 20, 30, 30, 20, 10]
    assert profile.seconds == 3.0


@pytest.mark.parametrize("policy", [Temporal(), WaterWave()])
def test_sound_policies_pass(policy):
    assert check_contract(policy, JOBS, 2, 1.0).policy == policy.name


class Forgetful(Temporal):
    """Leaves the last job out."""

    def schedule(self, jobs, budget, lanes=2):
        found = super().schedule(jobs, budget, lanes)
        return dataclasses.replace(found, pairs=found.pairs[:-1])


class Boasting(Temporal):
    """Says that it needs less than it does."""

    def schedule(self, jobs, budget, lanes=2):
        found = super().schedule(jobs, budget, lanes)
        return dataclasses.replace(found, peak_bytes=found.peak_bytes - 1)


class Fickle(WaterWave):
    """Plans differently each time."""

    calls = 0

    def schedule(self, jobs, budget, lanes=2):
        self.calls += 1
        if self.calls % 2:
            return super().schedule(jobs, budget, lanes)
        found = Temporal().schedule(jobs, budget, lanes)
        return dataclasses.replace(found, policy=self.name)


class Silent(Temporal):
    """Does not say what the jobs need."""

    def schedule(self, jobs, budget, lanes=2):
        try:
            return super().schedule(jobs, budget, lanes)
        except BudgetError:
            raise BudgetError("too small") from None


class Anonymous(Temporal):
    """Signs with another's name."""

    def schedule(self, jobs, budget, lanes=2):
        return dataclasses.replace(super().schedule(jobs, budget, lanes), policy="other")


@pytest.mark.parametrize(
    ("policy", "error"),
    [
        (Forgetful(), PlanError),
        (Boasting(), PlanError),
        (Fickle(), AssertionError),
        (Silent(), AssertionError),
        (Anonymous(), AssertionError),
    ],
)
def test_unsound_policies_do_not(policy, error):
    with pytest.raises(error):
        check_contract(policy, JOBS, 2, 4.0)


@settings(max_examples=20, deadline=None)
@given(jobs=plan_jobs(max_jobs=3))
def test_strategies_make_jobs_that_can_be_planned(jobs):
    assert 1 <= len(jobs) <= 3
    assert len({job.name for job in jobs}) == len(jobs)
    assert all(np.isfinite(job.profile.seconds) for job in jobs)
