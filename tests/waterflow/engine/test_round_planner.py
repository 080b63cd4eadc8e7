"""Plans of rounds: kept while the arena is as they found it, and never run when it is not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

import waterflow as wf
from tests.support.engine_parts import Parts, make_job, parts
from waterflow.allocator_ext import _C
from waterflow.common.errors import BudgetError
from waterflow.engine.in_flight import ScheduledStep
from waterflow.engine.round_planner import RoundPlanner
from waterflow.partitioner import get_policy

pytestmark = pytest.mark.cpu

FOREIGN = 9  # a job that the planner knows nothing of


@pytest.fixture
def engine() -> Iterator[Parts]:
    with parts() as found:
        yield found


def scheduled(engine: Parts, job: wf.Job) -> ScheduledStep:
    run, batch = engine.enter(job)
    step = run.captured.ready_step(batch)
    assert step is not None
    run.captured.load(step, batch)
    return ScheduledStep(run, step, batch, run.loop.rates())


def planner_of(engine: Parts, policy: str = "waterwave") -> RoundPlanner:
    return RoundPlanner(get_policy(policy), engine.context.lanes, engine.context.residency)


def test_a_plan_is_kept_while_the_arena_is_as_it_was(engine: Parts) -> None:
    planner, step = planner_of(engine), scheduled(engine, make_job("a"))
    arena = engine.context.arena
    plan = planner.plan([step])
    assert planner.plan([step]) is plan
    block = arena.allocate(256, 0, FOREIGN)
    other = planner.plan([step])
    assert other is not plan
    arena.free(block, 0)
    arena.synchronize()
    assert planner.plan([step]) is plan, "what has come and gone again changes nothing"


def test_rounds_of_other_jobs_are_planned_apart(engine: Parts) -> None:
    planner = planner_of(engine)
    one, other = scheduled(engine, make_job("a")), scheduled(engine, make_job("b", 16))
    plans = [planner.plan(steps) for steps in ([one], [other], [one, other])]
    assert len({id(plan) for plan in plans}) == 3
    assert len(planner.texts) == 3
    assert plans[2].peak <= engine.context.arena.statistics().capacity


def test_a_plan_whose_places_are_taken_does_not_begin(engine: Parts) -> None:
    planner, step = planner_of(engine), scheduled(engine, make_job("a"))
    arena = engine.context.arena
    plan = planner.plan([step])
    assert arena.allocate_at(int(arena.live_end), 64, 0, FOREIGN) is not None
    with pytest.raises(_C.StalePlan, match="version"):
        plan.begin(arena, own_blocks=True)
    planner.plan([step]).begin(arena, own_blocks=True)


def test_no_room_is_an_error_that_names_the_jobs(engine: Parts) -> None:
    planner, step = planner_of(engine), scheduled(engine, make_job("a"))
    arena = engine.context.arena
    free = int(arena.statistics().capacity) - int(arena.live_end)
    arena.allocate(free - step.step.memory.extent + 64, 0, FOREIGN)
    with pytest.raises(BudgetError, match="'a' were admitted but find no place"):
        planner.plan([step])


def test_a_planner_that_forgot_to_look_would_be_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that is handed out for an arena that has changed ends the run loudly, before it has
    written anywhere."""
    kept: dict[Any, Any] = {}

    def plan(self: RoundPlanner, steps: Any) -> Any:
        key = tuple(step.step for step in steps)
        if key not in kept:
            kept[key] = make(self, steps)
        return kept[key]

    make = RoundPlanner.plan
    monkeypatch.setattr(RoundPlanner, "plan", plan)
    engine = wf.Engine("8MiB", policy="temporal", threads=1)
    first = engine.submit(make_job("a", 64, steps=10**9))
    while not kept:  # until "a" is captured and runs alone: such rounds go on beside "b"
        time.sleep(0.001)
    engine.submit(make_job("b", 32, steps=10**9, capture=False))
    with pytest.raises(_C.StalePlan):
        engine.close()
    assert first.status == "failed"
