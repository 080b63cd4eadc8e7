"""A round's plan carries the version of the arena for which it was made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from waterflow.allocator_ext import _C
from waterflow.executor.plan.round_plan import RoundPlan, plan_round
from waterflow.executor.plan.step_memory import StepMemory
from waterflow.executor.run.tape import CompiledStep
from waterflow.partitioner.policies.base import PlanJob
from waterflow.partitioner.policies.temporal import Temporal
from waterflow.partitioner.testing import triangle

pytestmark = pytest.mark.virtual

PERSISTENT = 9  # the job of what lives all the time


@dataclass
class Setting:
    arena: Any
    plan: RoundPlan


@pytest.fixture
def setting() -> Setting:
    """Two jobs' steps above a persistent block of 64 bytes."""
    arena = _C.Arena.virtual(1 << 20, 2)
    arena.allocate(64, 0, PERSISTENT)
    profiles = [triangle(6, 64), triangle(9, 64)]
    jobs = [PlanJob(str(number), profile) for number, profile in enumerate(profiles)]
    schedule = Temporal().schedule(jobs, 1 << 20, 2)
    steps = [
        (number, CompiledStep(_C.Tape(0, 0), lowered=None), StepMemory(profile, 64))
        for number, profile in enumerate(profiles)
    ]
    plan = plan_round(arena, schedule, steps)
    assert plan is not None
    return Setting(arena, plan)


def test_the_version_is_the_arenas(setting: Setting) -> None:
    assert setting.plan.version == setting.arena.version
    for _ in range(3):
        setting.plan.begin(setting.arena, own_blocks=True)
    assert setting.plan.version == setting.arena.version


def test_a_plan_does_not_begin_in_an_arena_that_was_changed_behind_its_back(
    setting: Setting,
) -> None:
    arena, plan = setting.arena, setting.plan
    block = arena.allocate(64, 0, PERSISTENT)
    with pytest.raises(_C.StalePlan) as caught:
        plan.begin(arena, own_blocks=True)
    assert f"at version {plan.version}, which is now at version {arena.version}" in str(
        caught.value
    )
    assert "64 bytes of job 9 lie at offset 64" in str(caught.value)
    plan.begin(arena, own_blocks=False)  # the allocator judges each place
    arena.free(block, 0)
    plan.begin(arena, own_blocks=True)
