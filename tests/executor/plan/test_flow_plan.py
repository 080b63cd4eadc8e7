"""Flowing steps find the same places from both ends of a range, and never each other's."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.flow import AMPLE, UNIT, flowing_profiles, in_units
from waterflow.allocator_ext import _C
from waterflow.executor.plan.flow_plan import Flowing, FlowPlan, num_ranges
from waterflow.executor.plan.piled_step import PiledStep, pile_step
from waterflow.executor.plan.step_memory import StepMemory
from waterflow.executor.run.tape import CompiledStep
from waterflow.partitioner.profile import Profile
from waterflow.partitioner.testing import triangle

pytestmark = pytest.mark.virtual

PERSISTENT = 9  # the job of what lives all the time


class RecordedMemory(StepMemory):
    """Keeps the memory_plans that a plan makes of it."""

    def __init__(self, profile: Profile) -> None:
        super().__init__(profile, UNIT)
        self.memory_plans: list[Any] = []

    def memory_plan(self, offsets: Any, version: int) -> Any:
        self.memory_plans.append(super().memory_plan(offsets, version))
        return self.memory_plans[-1]


def compiled() -> CompiledStep:
    return CompiledStep(_C.Tape(0, 0), lowered=None)


# How lanes share


@pytest.mark.parametrize(
    ("size", "tallest", "lanes", "expected"),
    [
        (100, 100, 2, 1),
        (199, 100, 4, 1),
        (200, 100, 4, 2),
        (1000, 100, 4, 2),
        (1000, 100, 5, 3),
        (1000, 100, 1, 1),
        (1000, 0, 4, 2),
    ],
)
def test_number_of_ranges(size: int, tallest: int, lanes: int, expected: int) -> None:
    assert num_ranges(size, tallest, lanes) == expected


@dataclass
class Lane:
    """A lane's step under way, and what it holds."""

    step: int | None = None
    group: int = 0
    memory_plan: Any = None
    actions: list[tuple[str, int, int]] = field(default_factory=list)  # of the present group
    held: dict[int, int] = field(default_factory=dict)  # block -> pointer


@dataclass
class Jobs:
    """Steps of jobs that flow over an arena, taken through by lanes in an order of chance."""

    own: list[Profile]
    lanes: int
    spare: float  # of the tallest pile
    headroom: float
    rng: random.Random
    own_blocks: bool

    def __post_init__(self) -> None:
        self.memories = [RecordedMemory(profile) for profile in self.own]
        self.piled = [pile_step(memory, self.headroom, AMPLE) for memory in self.memories]
        tallest = max(piled.extent for piled in self.piled)
        capacity = 10 * UNIT + int(tallest * (1 + self.spare)) // UNIT * UNIT
        self.arena = _C.Arena.virtual(capacity, self.lanes)
        self.arena.allocate(10 * UNIT, 0, PERSISTENT)
        self.steps = [compiled() for _ in self.own]
        self.plan = self.make_plan()
        self.live: dict[int, int] = {self.arena.pointer_to(0): 10 * UNIT}
        self.at = [Lane() for _ in range(self.plan.lanes)]
        self.memory_plans: dict[tuple[int, int], Any] = {}  # by step and lane

    def make_plan(self) -> FlowPlan:
        jobs = enumerate(zip(self.steps, self.memories, self.piled, strict=True))
        return FlowPlan(
            self.arena, self.lanes, [(Flowing(i, step, m), piled) for i, (step, m, piled) in jobs]
        )

    def run(self, count: int) -> None:
        """Until so many steps have begun and all have ended."""
        self.todo = count
        while self.todo or any(lane.step is not None for lane in self.at):
            order = self.rng.sample(range(len(self.at)), len(self.at))
            assert any(self.act(lane) for lane in order), "deadlock"

    def act(self, number: int) -> bool:
        lane = self.at[number]
        if lane.actions:
            self.do(number, lane, lane.actions.pop(0))
        elif lane.step is None:
            return self.todo > 0 and self.begin(number, lane)
        elif lane.group == len(self.piled[lane.step].groups):
            self.end(number, lane)
        else:
            return self.enter(number, lane)
        return True

    def begin(self, number: int, lane: Lane) -> bool:
        under_way = {other.step for other in self.at}
        idle = [step for step in range(len(self.own)) if step not in under_way]
        step = self.rng.choice(idle) if idle else None
        if step is None or not self.plan.gate.try_begin(number, self.piled[step].demand):
            return False
        made = len(self.memories[step].memory_plans)
        self.plan.begin(self.steps[step], number, self.own_blocks)
        if len(self.memories[step].memory_plans) > made:
            self.memory_plans[step, number] = self.memories[step].memory_plans[-1]
        lane.step, lane.group, lane.memory_plan = step, 0, self.memory_plans[step, number]
        self.todo -= 1
        return True

    def enter(self, number: int, lane: Lane) -> bool:
        assert lane.step is not None
        if not self.plan.gate.try_enter(number):
            return False
        if not self.own_blocks:
            self.arena.synchronize()
        group = self.piled[lane.step].groups[lane.group]
        events = self.own[lane.step].events
        for node in range(group.start, group.stop):
            lane.actions.append(("begin", node, 0))
            mine = events[events["node"] == node]
            lane.actions += [("block", size, name) for _, size, name in mine.tolist()]
            lane.actions.append(("end", node, 0))
        lane.actions.append(("leave", 0, 0))
        return True

    def do(self, number: int, lane: Lane, action: tuple[str, int, int]) -> None:
        what, value, name = action
        if what == "begin":
            lane.memory_plan.begin_instruction(value)
        elif what == "end":
            lane.memory_plan.end_instruction(self.arena, number)
        elif what == "leave":
            self.plan.gate.leave(number)
            lane.group += 1
        elif value > 0:
            self.take(number, lane, value, name)
        else:
            self.release(number, lane, name)

    def take(self, number: int, lane: Lane, size: int, name: int) -> None:
        pointer = lane.memory_plan.take(self.arena, size, number)
        assert self.arena.owns(pointer)
        assert self.arena.owns(pointer + size - 1)
        shared = [
            at for at, held in self.live.items() if at < pointer + size and pointer < at + held
        ]
        assert not shared, "two live blocks overlap"
        self.live[pointer] = size
        lane.held[name] = pointer

    def release(self, number: int, lane: Lane, name: int) -> None:
        pointer = lane.held.pop(name)
        del self.live[pointer]
        if not lane.memory_plan.release(self.arena, pointer):
            self.arena.free(pointer, number)

    def end(self, number: int, lane: Lane) -> None:
        assert not lane.held
        lane.memory_plan.close(self.arena)
        self.plan.gate.end(number)
        lane.step = None


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_steps_on_lanes_never_take_each_others_places(data: st.DataObject) -> None:
    own = data.draw(st.lists(flowing_profiles(), min_size=1, max_size=4))
    lanes = data.draw(st.integers(1, 4))
    spare = data.draw(st.sampled_from([0.0, 0.3, 1.0, 3.0]))
    headroom = data.draw(st.sampled_from([0.0, 0.1]))
    rng = random.Random(data.draw(st.integers(0, 1 << 32)))
    jobs = Jobs(own, lanes, spare, headroom, rng, own_blocks=data.draw(st.booleans()))
    jobs.run(count=6)
    assert jobs.plan.deviations == 0
    assert not jobs.plan.deviated
    assert jobs.arena.statistics().live == 10 * UNIT


def test_lanes_that_there_is_memory_for() -> None:
    one = in_units(triangle(10))
    for spare, lanes, expected in ((0.0, 2, 2), (0.9, 4, 2), (1.0, 4, 4), (5.0, 3, 3), (5.0, 1, 1)):
        jobs = Jobs([one], lanes, spare, 0.0, random.Random(0), own_blocks=True)
        assert jobs.plan.lanes == expected, (spare, lanes)


# The plan


def simple_plan(
    capacity: int, lanes: int = 2, half: int = 10
) -> tuple[Any, CompiledStep, RecordedMemory, PiledStep, FlowPlan]:
    memory = RecordedMemory(in_units(triangle(half)))
    arena = _C.Arena.virtual(capacity, lanes)
    step, piled = compiled(), pile_step(memory, 0.0, AMPLE)
    return arena, step, memory, piled, FlowPlan(arena, lanes, [(Flowing(0, step, memory), piled)])


def test_a_plan_knows_its_steps() -> None:
    _, step, memory, _, plan = simple_plan(20 * UNIT)
    assert plan.has(step)
    assert not plan.has(compiled())
    for lane in (0, 1, 0, 1):
        plan.begin(step, lane, own_blocks=True)
    assert len(memory.memory_plans) == 2, "one a lane, used again"
    plan.end()
    assert not plan.has(step), "its memory may be somebody else's"


def test_a_step_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=f"a step of {10 * UNIT} bytes does not fit {9 * UNIT}"):
        simple_plan(9 * UNIT)


@pytest.mark.parametrize(("lanes", "units"), [(1, 15), (2, 25), (3, 50), (4, 50)])
def test_what_was_not_profiled_lies_beside_every_pile(lanes: int, units: int) -> None:
    """As long as there is memory that no pile reaches."""
    arena, step, memory, piled, plan = simple_plan(units * UNIT, lanes)
    starts: set[int] = set()
    for lane in range(plan.lanes):
        plan.begin(step, lane, own_blocks=True)
        size = units * UNIT // (1 if plan.lanes < 3 else 2)
        first = lane // 2 * size
        starts.update(piled.places(first, first + size, from_top=lane % 2 == 1).tolist())
    memory_plan = memory.memory_plans[0]
    memory_plan.begin_instruction(0)
    pointer = memory_plan.take(arena, 2 * UNIT, 0)
    assert plan.deviated
    assert plan.deviations == 1
    assert pointer is not None, "there is room"
    offset = arena.offset_of(pointer)
    assert not starts & {offset, offset + UNIT}
    plan.open()
    assert not plan.deviated


def test_a_plan_does_not_begin_where_others_lie() -> None:
    """Something has taken a place of one of its steps since it was made."""
    arena, step, _, piled, plan = simple_plan(20 * UNIT)
    assert plan.version == arena.version
    plan.begin(step, 0, own_blocks=True)
    top = 20 * UNIT - int(piled.extent)
    intruder = arena.allocate_at(top, UNIT, 0, PERSISTENT)
    plan.open()
    plan.begin(step, 0, own_blocks=True)
    with pytest.raises(_C.StalePlan, match=f"at version {plan.version}, which is now at version"):
        plan.begin(step, 1, own_blocks=True)
    arena.free(intruder, 0)
    plan.begin(step, 1, own_blocks=True)


def test_a_step_begins_while_the_other_lanes_blocks_are_the_allocators() -> None:
    """After a deviation, or with the checker, they lie in places that are this one's, too."""
    arena, step, memory, _, plan = simple_plan(10 * UNIT)
    plan.begin(step, 0, own_blocks=True)
    memory_plan = memory.memory_plans[0]
    memory_plan.begin_instruction(0)
    assert memory_plan.take(arena, UNIT, 0) is not None
    memory_plan.begin_instruction(1)
    assert memory_plan.take(arena, 2 * UNIT, 0) is None
    assert arena.version != plan.version
    plan.begin(step, 1, own_blocks=True)


def test_without_room_beside_the_piles_a_request_is_refused() -> None:
    arena, step, memory, _, plan = simple_plan(20 * UNIT)
    plan.begin(step, 0, own_blocks=True)
    memory.memory_plans[0].begin_instruction(0)
    assert memory.memory_plans[0].take(arena, 2 * UNIT, 0) is None
