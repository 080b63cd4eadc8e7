"""A planned step's places hold while kernels ask for what the profile has, and for other things."""

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from waterflow.allocator_ext import _C

pytestmark = pytest.mark.virtual

LANES = 2
ROOMY = 1 << 22
PERSISTENT = 9  # the job of what lives all the time

Event = tuple[int, int]  # bytes (0: a free), id
Program = list[list[Event]]  # by instruction
Slot = tuple[int, int, int]  # lane, step, group
Action = tuple[int, Callable[[], None]]  # step, what its lane does


@dataclass
class Step:
    """What a step was profiled to ask for; group g is instructions[stops[g - 1] : stops[g]]."""

    instructions: Program
    stops: list[int]

    def group(self, index: int) -> range:
        return range(self.stops[index - 1] if index else 0, self.stops[index])

    def arrays(self) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
        """The events in whole units, as an arena's log has them, and the instruction of each."""
        sizes: dict[int, int] = {}
        amounts, ids, nodes = [], [], []
        for index, events in enumerate(self.instructions):
            for size, name in events:
                sizes.setdefault(name, size)
                amounts.append(rounded(size) or -rounded(sizes[name]))
                ids.append(name)
                nodes.append(index)
        ends = np.searchsorted(nodes, self.stops)
        step = (np.array(amounts, np.int64), np.array(ids, np.int32), ends.astype(np.int32))
        return step, np.array(nodes, np.int32)


@dataclass
class Plan:
    """A round's memory plans over an arena, as executor/plan/round_plan.py makes them."""

    arena: _C.Arena
    steps: list[Step]
    pairs: list[list[Slot]]
    result: _C.RehearsalResult
    memory_plans: list[_C.MemoryPlan]

    @property
    def deviations(self) -> int:
        return sum(memory_plan.deviations for memory_plan in self.memory_plans)

    def begin(self, keep_blocks: bool) -> None:
        chunks = self.arena.snapshot().chunks()
        ends = [chunk.offset + chunk.bytes for chunk in chunks if chunk.state == _C.ChunkState.LIVE]
        jobs = [(memory_plan, job) for job, memory_plan in enumerate(self.memory_plans)]
        above = max(self.result.extent, *ends, 0)
        beside = _C.RoundMemory(above, self.arena.statistics().capacity)
        _C.begin_plans(self.arena, jobs, beside, keep_blocks)


def make_plan(arena: _C.Arena, steps: list[Step], pairs: list[list[Slot]]) -> Plan:
    """The job of a step is its number."""
    arrays = [step.arrays() for step in steps]
    events = [step for step, _ in arrays]
    state = arena.snapshot()
    result = _C.rehearse(state, events, list(range(len(steps))), pairs)
    assert result.fits, result.why
    memory_plans = [
        _C.MemoryPlan(step, nodes, len(profiled.instructions), offsets.tolist(), state.version())
        for (step, nodes), profiled, offsets in zip(arrays, steps, result.offsets, strict=True)
    ]
    return Plan(arena, steps, pairs, result, memory_plans)


@dataclass
class Round:
    """Carries programs out as lanes do, and keeps an account of its own of who has which bytes.

    `programs` are what the steps really ask for, instruction by instruction. A step that fails
    frees its blocks at once if it `lets_go`, else when the round is over.
    """

    plan: Plan
    programs: list[Program]
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    keep_blocks: bool = True
    lets_go: bool = False

    def __post_init__(self) -> None:
        self.arena = self.plan.arena
        self.held: list[dict[int, int]] = [{} for _ in self.programs]
        self.taken: list[list[int]] = [[] for _ in self.programs]  # offsets, in order
        self.failed = [False for _ in self.programs]
        self.log: list[tuple[int, int, int, int, int]] = []
        self.live = {
            self.arena.pointer_to(chunk.offset): chunk.bytes
            for chunk in self.arena.snapshot().chunks()
            if chunk.state == _C.ChunkState.LIVE
        }

    def run(self) -> None:
        self.plan.begin(self.keep_blocks)
        self.synchronize()
        for pair in self.plan.pairs:
            self.run_pair(pair)
            self.synchronize()
        for memory_plan in self.plan.memory_plans:
            memory_plan.close(self.arena)
        self.check()

    def run_pair(self, pair: list[Slot]) -> None:
        """The lanes' actions in an order of chance."""
        queues: list[list[Action]] = [[] for _ in range(LANES)]
        for lane, step, group in pair:
            for instruction in self.plan.steps[step].group(group):
                queues[lane] += self.actions(lane, step, instruction)
        while any(queues):
            step, act = self.rng.choice([queue for queue in queues if queue]).pop(0)
            if not self.failed[step]:
                act()
            self.check()

    def actions(self, lane: int, step: int, instruction: int) -> Iterator[Action]:
        memory_plan = self.plan.memory_plans[step]
        yield step, partial(memory_plan.begin_instruction, instruction)
        for size, name in self.programs[step][instruction]:
            if size > 0:
                yield step, partial(self.take, lane, step, size, name)
            else:
                yield step, partial(self.release, lane, step, name)
        yield step, partial(memory_plan.end_instruction, self.arena, lane)

    def take(self, lane: int, step: int, size: int, name: int) -> None:
        pointer = self.plan.memory_plans[step].take(self.arena, size, lane)
        if pointer is None:
            self.fail(lane, step)
            return
        size = rounded(size)
        self.note(_C.EventKind.ALLOC, pointer, size, lane)
        assert self.arena.owns(pointer)
        assert self.arena.owns(pointer + size - 1)
        shared = [
            at for at, held in self.live.items() if at < pointer + size and pointer < at + held
        ]
        assert not shared, "two live blocks overlap"
        self.live[pointer] = size
        self.held[step][name] = pointer
        self.taken[step].append(self.arena.offset_of(pointer))

    def fail(self, lane: int, step: int) -> None:
        """Out of memory: what comes next of the step is left out."""
        self.failed[step] = True
        if self.lets_go:
            for name in list(self.held[step]):
                self.release(lane, step, name)

    def release(self, lane: int, step: int, name: int) -> None:
        """As release_if_in_arena does. A program may lack the request of a free that it has."""
        if name not in self.held[step]:
            return
        pointer = self.held[step].pop(name)
        self.note(_C.EventKind.FREE, pointer, self.live.pop(pointer), lane)
        if not self.plan.memory_plans[step].release(self.arena, pointer):
            self.arena.free(pointer, lane)

    def synchronize(self) -> None:
        self.arena.synchronize()
        self.log.append((0, 0, _C.NO_LANE, -1, _C.EventKind.SYNC))

    def note(self, kind: _C.EventKind, pointer: int, size: int, lane: int) -> None:
        self.log.append((self.arena.offset_of(pointer), size, lane, 0, kind))

    def check(self) -> None:
        assert self.arena.statistics().live == sum(self.live.values())

    def finish(self) -> None:
        """Frees what the steps left alive; then nothing is left, and no lane was in another's."""
        for step, held in enumerate(self.held):
            for name in list(held):
                self.release(0, step, name)
        self.synchronize()
        self.check()
        assert all(self.arena.held(step) == 0 for step in range(len(self.programs)))
        self.arena.snapshot().check_consistency()
        log = np.array(self.log, _C.EVENT_DTYPE)
        assert _C.check_happens_before(log, LANES) == []


def rounded(size: int) -> int:
    return -(-size // 64) * 64


def play(plan: Plan, programs: list[Program], seed: int = 0, keep_blocks: bool = True) -> Round:
    """One round, from its start until nothing of it is left."""
    played = Round(plan, programs, random.Random(seed), keep_blocks)
    played.run()
    played.finish()
    return played


def expect_as_planned(plan: Plan, seed: int = 0, keep_blocks: bool = True) -> None:
    """An undisturbed round gets each planned place, and stays below the rehearsal's peak."""
    before, version = plan.deviations, plan.arena.version
    plan.arena.reset_peaks()
    played = play(plan, [step.instructions for step in plan.steps], seed, keep_blocks)
    assert plan.arena.version == version, "the round has given back all that it took"
    assert played.taken == [offsets.tolist() for offsets in plan.result.offsets]
    assert plan.deviations == before
    assert plan.arena.statistics().peak <= plan.result.peak
    assert plan.arena.statistics().extent <= plan.result.extent


# Random rounds


def random_step(rng: random.Random) -> Step:
    """Few sizes, so that wrong requests often look like planned ones."""
    held: list[int] = []
    names = count()
    instructions: Program = []
    stops = []
    for _ in range(rng.randint(1, 5)):
        for _ in range(rng.randint(1, 3)):
            events: list[Event] = []
            for _ in range(rng.randrange(7)):
                if held and rng.random() < 0.5:
                    events.append((0, held.pop(rng.randrange(len(held)))))
                else:
                    held.append(next(names))
                    events.append((rng.choice([64, 100, 640, rng.randrange(1, 2000)]), held[-1]))
            instructions.append(events)
        stops.append(len(instructions))
    return Step(instructions, stops)


def random_pairs(rng: random.Random, steps: list[Step]) -> list[list[Slot]]:
    following = [0] * len(steps)
    pairs = []
    while any(group < len(step.stops) for group, step in zip(following, steps, strict=True)):
        pair = []
        for index in rng.sample(range(len(steps)), rng.randint(1, len(steps))):
            lane = rng.randrange(LANES)
            for _ in range(rng.randint(1, 2)):
                if following[index] < len(steps[index].stops):
                    pair.append((lane, index, following[index]))
                    following[index] += 1
        pairs.append(pair)
    return pairs


def random_plan(rng: random.Random, capacity: int = ROOMY) -> Plan:
    arena = _C.Arena.virtual(capacity, LANES)
    persistent = [arena.allocate(rng.randrange(1, 3000), 0, PERSISTENT) for _ in range(4)]
    for pointer in rng.sample(persistent, 2):  # so that plans have holes to fill
        arena.free(pointer, 0)
    steps = [random_step(rng) for _ in range(rng.randint(1, 2))]
    return make_plan(arena, steps, random_pairs(rng, steps))


def requests(program: Program) -> list[tuple[int, int]]:
    """Where the requests are: instruction, place in it."""
    return [
        (index, at)
        for index, events in enumerate(program)
        for at, (size, _) in enumerate(events)
        if size > 0
    ]


def insert_extra(rng: random.Random, program: Program, index: int, at: int, size: int) -> None:
    name = 10_000 + rng.randrange(1 << 20)
    program[index].insert(at, (size, name))
    freed = rng.randrange(index, len(program) + 1)
    if freed == index:
        program[index].insert(rng.randint(at + 1, len(program[index])), (0, name))
    elif freed < len(program):
        program[freed].insert(rng.randint(0, len(program[freed])), (0, name))


def ask_for_the_next_too(rng: random.Random, program: Program) -> None:
    index, at = rng.choice(requests(program))
    insert_extra(rng, program, index, at, program[index][at][0])


def ask_for_more(rng: random.Random, program: Program) -> None:
    index = rng.randrange(len(program))
    at = rng.randint(0, len(program[index]))
    insert_extra(rng, program, index, at, rng.choice([1, 64, 128, 640, 3000]))


def leave_out(rng: random.Random, program: Program) -> None:
    index, at = rng.choice(requests(program))
    program[index].pop(at)


def ask_for_another_size(rng: random.Random, program: Program) -> None:
    index, at = rng.choice(requests(program))
    size, name = program[index][at]
    program[index][at] = (rng.choice([1, size + 64, max(1, size - 64), 2 * size]), name)


def swap_lifetimes(rng: random.Random, program: Program) -> None:
    """Of two requests of one instruction and one size: the profile cannot tell them apart."""
    places = requests(program)
    twins = [
        (one, other)
        for number, one in enumerate(places)
        for other in places[number + 1 :]
        if one[0] == other[0]
        and rounded(program[one[0]][one[1]][0]) == rounded(program[other[0]][other[1]][0])
    ]
    if twins:
        (index, one), (_, other) = rng.choice(twins)
        events = program[index]
        events[one], events[other] = (
            (events[one][0], events[other][1]),
            (
                events[other][0],
                events[one][1],
            ),
        )


def move_a_free(rng: random.Random, program: Program) -> None:
    """Earlier, later or never; one before its request counts as never."""
    frees = [
        (index, at)
        for index, events in enumerate(program)
        for at, (size, _) in enumerate(events)
        if size == 0
    ]
    if frees:
        index, at = rng.choice(frees)
        free = program[index].pop(at)
        target = rng.randrange(len(program) + 1)
        if target < len(program):
            program[target].insert(rng.randint(0, len(program[target])), free)


def reorder(rng: random.Random, program: Program) -> None:
    rng.shuffle(rng.choice(program))


DEVIATIONS = [
    ask_for_the_next_too,
    ask_for_more,
    leave_out,
    ask_for_another_size,
    swap_lifetimes,
    move_a_free,
    reorder,
]


def deviating(rng: random.Random, step: Step) -> Program:
    program = copy.deepcopy(step.instructions)
    for _ in range(rng.choice([0, 1, 1, 2, 4])):
        if requests(program):
            rng.choice(DEVIATIONS)(rng, program)
    return program


@given(st.integers(0, 1 << 32))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_a_round_as_profiled_gets_the_planned_places(seed: int) -> None:
    plan = random_plan(random.Random(seed))
    for order in range(2):
        expect_as_planned(plan, order)
    expect_as_planned(plan, keep_blocks=False)


@given(st.integers(0, 1 << 32))
@settings(max_examples=600, deadline=None, derandomize=True)
def test_no_deviation_lets_two_blocks_overlap(seed: int) -> None:
    rng = random.Random(seed)
    plan = random_plan(rng)
    programs = [deviating(rng, step) for step in plan.steps]
    played = play(plan, programs, seed, keep_blocks=rng.random() < 0.8)
    assert not any(played.failed), "there is room above the plan"
    expect_as_planned(plan, seed)


@given(st.integers(0, 1 << 32))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_nothing_overlaps_where_there_is_no_room_above_the_plan(seed: int) -> None:
    rng = random.Random(seed)
    plan = random_plan(rng)
    plan.arena.synchronize()
    assert plan.arena.resize(max(64, plan.result.extent + rng.choice([0, 64, 640, 4096])))
    programs = [deviating(rng, step) for step in plan.steps]
    played = Round(plan, programs, rng, lets_go=rng.random() < 0.5)
    played.run()
    played.finish()
    expect_as_planned(plan, seed)


# Written by hand


@pytest.fixture
def arena() -> _C.Arena:
    return _C.Arena.virtual(8192, LANES)


def solo(arena: _C.Arena, instructions: Program) -> Plan:
    step = Step(instructions, [len(instructions)])
    return make_plan(arena, [step], [[(0, 0, 0)]])


def test_an_extra_request_of_the_next_ones_size(arena: _C.Arena) -> None:
    """It gets the workspace's place, and the workspace that of the result, which is not free."""
    plan = solo(arena, [[(512, 0), (0, 0), (512, 1)], [(0, 1)]])
    assert plan.result.offsets[0].tolist() == [0, 0]
    extra = [[(512, 7), (512, 0), (0, 0), (512, 1), (0, 7)], [(0, 1)]]
    played = play(plan, [extra])
    assert played.taken == [[0, 512, 1024]]
    assert plan.deviations == 2
    expect_as_planned(plan)


def test_two_requests_that_swap_their_lifetimes(arena: _C.Arena) -> None:
    """All requests are as profiled; only what is alive after the instruction tells."""
    plan = solo(arena, [[(512, 0), (512, 1), (0, 0)], [(512, 2)], [(0, 1), (0, 2)]])
    assert plan.result.offsets[0].tolist() == [0, 512, 0]
    swapped = [[(512, 1), (512, 0), (0, 0)], [(512, 2)], [(0, 1), (0, 2)]]
    assert play(plan, [swapped]).taken == [[0, 512, 1024]]
    assert plan.deviations == 1
    expect_as_planned(plan)


@pytest.fixture
def handing_on(arena: _C.Arena) -> Plan:
    """Job 1's block has the place of job 0's, in the next pair."""
    steps = [Step([[(512, 0), (0, 0)], [(64, 1), (0, 1)]], [1, 2]), Step([[(512, 0), (0, 0)]], [1])]
    plan = make_plan(arena, steps, [[(0, 0, 0)], [(1, 1, 0), (0, 0, 1)]])
    assert [offsets.tolist() for offsets in plan.result.offsets] == [[0, 512], [0]]
    return plan


def test_a_block_that_outlives_its_plan_into_another_jobs_place(handing_on: Plan) -> None:
    program = handing_on.steps[1].instructions
    late = [[(512, 0)], [(64, 1), (0, 1), (0, 0)]]
    for seed in range(4):
        played = play(handing_on, [late, program], seed)
        assert played.taken == [[0, 512], [576]]
    expect_as_planned(handing_on)


def test_a_block_that_is_never_freed(handing_on: Plan) -> None:
    """It is the allocator's when the round is over, and counts as its job's."""
    played = Round(handing_on, [[[(512, 0)], []], handing_on.steps[1].instructions])
    played.run()
    arena = handing_on.arena
    assert [arena.held(job) for job in range(2)] == [512, 0]
    assert arena.find(arena.pointer_to(0)).job == 0
    played.finish()
    expect_as_planned(handing_on)


def test_what_a_step_creates_survives_it(arena: _C.Arena) -> None:
    plan = solo(arena, [[(512, 0), (64, 1), (0, 0)]])
    played = Round(plan, [plan.steps[0].instructions])
    played.run()
    assert plan.deviations == 0
    assert (arena.held(0), arena.peak(0)) == (64, 576)
    assert arena.find(arena.pointer_to(512)).bytes == 64
    played.finish()


def test_no_room_above_the_plan(handing_on: Plan) -> None:
    """The request is refused, and the other job gets its place when the step has let go of it."""
    assert handing_on.arena.resize(handing_on.result.extent)
    program = handing_on.steps[1].instructions
    extra = [[(512, 0), (64, 7)], [(64, 1), (0, 1)]]
    played = Round(handing_on, [extra, program], lets_go=True)
    played.run()
    assert played.failed == [True, False]
    assert played.taken == [[0], [0]]
    played.finish()
    expect_as_planned(handing_on)


def test_what_a_refused_step_holds_is_no_other_jobs(handing_on: Plan) -> None:
    assert handing_on.arena.resize(handing_on.result.extent)
    program = handing_on.steps[1].instructions
    played = Round(handing_on, [[[(512, 0), (64, 7)], [(64, 1), (0, 1)]], program])
    played.run()
    assert played.taken == [[0], []]
    assert handing_on.arena.held(0) == 512
    played.finish()


def test_no_block_is_another_scripts(handing_on: Plan) -> None:
    """A memory plan tells its own blocks from the allocator's and from other jobs'."""
    arena, (first, second) = handing_on.arena, handing_on.memory_plans
    handing_on.begin(keep_blocks=True)
    first.begin_instruction(0)
    own = first.take(arena, 500, 0)
    assert not second.release(arena, own)
    assert not first.release(arena, own + 64)
    with pytest.raises(_C.UnknownChunk):
        first.release(arena, 64)
    assert first.release(arena, own)
    assert not first.release(arena, own)


def test_samples_of_a_round_reach_the_timeline(handing_on: Plan) -> None:
    arena = handing_on.arena
    play(handing_on, [step.instructions for step in handing_on.steps])
    _, jobs, held = arena.timeline()
    assert set(jobs.tolist()) == {0, 1}
    assert max(held.tolist()) == 512
    assert [arena.peak(job) for job in range(2)] == [512, 512]
    assert arena.statistics().extent == handing_on.result.extent


# The arena has changed since the plan was made


def test_steps_that_keep_their_blocks_leave_the_version(handing_on: Plan) -> None:
    """At no time of the round: it is the plan's as long as everybody keeps to the plan."""
    arena, memory_plan = handing_on.arena, handing_on.memory_plans[0]
    before = arena.version
    handing_on.begin(keep_blocks=True)
    memory_plan.begin_instruction(0)
    block = memory_plan.take(arena, 512, 0)
    assert arena.version == before
    assert memory_plan.take(arena, 64, 0) is not None
    assert arena.version != before, "after a deviation the allocator has the blocks"
    assert not memory_plan.release(arena, block)


@pytest.mark.parametrize(("offset", "size"), [(0, 64), (448, 64), (512, 64), (0, 4096)])
def test_a_plan_whose_places_are_taken_does_not_begin(
    handing_on: Plan, offset: int, size: int
) -> None:
    """Somebody has put a block there behind its back."""
    arena, planned = handing_on.arena, handing_on.arena.version
    expect_as_planned(handing_on)
    block = arena.allocate_at(offset, size, 0, 5)
    with pytest.raises(_C.StalePlan) as caught:
        handing_on.begin(keep_blocks=True)
    text = str(caught.value)
    assert f"at version {planned}, which is now at version {arena.version}: " in text
    assert f"{size} bytes of job 5 lie at offset {offset}" in text
    assert "plan again" in text
    arena.free(block, 0)
    arena.synchronize()
    expect_as_planned(handing_on)


def test_a_plan_that_moved_persistent_tensors_have_overtaken_does_not_begin() -> None:
    """As when a gap between them is closed, or one grows: all that the plan knew of has moved."""
    arena = _C.Arena.virtual(64 * 1024, LANES)
    first, second = arena.allocate(64, 0, 7), arena.allocate(640, 0, 8)
    plan = solo(arena, [[(512, 0), (0, 0)]])
    assert plan.result.offsets[0].tolist() == [704]
    arena.free(first, 0)
    arena.free(second, 0)
    arena.synchronize()
    assert arena.allocate_at(64, 704, 0, 8) is not None
    with pytest.raises(_C.StalePlan, match="704 bytes of job 8 lie at offset 64, in a place"):
        plan.begin(keep_blocks=True)


def test_a_plan_beyond_the_end_of_the_arena_does_not_begin(handing_on: Plan) -> None:
    arena = handing_on.arena
    capacity = arena.statistics().capacity
    assert arena.resize(512)
    with pytest.raises(_C.StalePlan, match="it ends at 512 bytes, the plan at 576"):
        handing_on.begin(keep_blocks=True)
    assert arena.resize(capacity)
    expect_as_planned(handing_on)


def test_what_has_gone_or_lies_elsewhere_makes_no_plan_stale() -> None:
    """Tensors that user code has kept go when it lets go of them, on whatever thread."""
    arena = _C.Arena.virtual(64 * 1024, LANES)
    kept, _ = arena.allocate(64, 0, 7), arena.allocate(64, 0, 8)
    plan = solo(arena, [[(512, 0), (0, 0)]])
    arena.free(kept, _C.NO_LANE)
    expect_as_planned(plan)
    assert arena.allocate_at(6400, 64, 0, 7) is not None
    for _ in range(2):
        assert play(plan, [plan.steps[0].instructions]).taken == [[128]]
    assert plan.deviations == 0


def test_where_the_allocator_judges_a_taken_place_is_a_deviation(handing_on: Plan) -> None:
    block = handing_on.arena.allocate_at(0, 512, 0, 5)
    played = play(handing_on, [step.instructions for step in handing_on.steps], keep_blocks=False)
    assert played.taken == [[576, 512], [1088]]
    assert handing_on.deviations == 2
    handing_on.arena.free(block, 0)


def test_the_peak_counts_what_the_allocator_gives_out_beside_planned_blocks() -> None:
    """As to an eager step of another job, whose request is the last to come and the first to go."""
    arena = _C.Arena.virtual(64 * 1024, LANES)
    plan = solo(arena, [[(512, 0)], [(0, 0)]])
    (memory_plan,) = plan.memory_plans
    plan.begin(keep_blocks=True)
    memory_plan.begin_instruction(0)
    planned = memory_plan.take(arena, 512, 0)
    beside = arena.allocate_at(1024, 640, 1, 7)
    arena.free(beside, 1)
    assert arena.statistics().peak == 512 + 640
    memory_plan.begin_instruction(1)
    assert memory_plan.release(arena, planned)
    memory_plan.close(arena)
    arena.reset_peaks()
    assert arena.statistics().peak == arena.statistics().live == 0


def test_places_must_be_as_many_as_requests() -> None:
    step, nodes = Step([[(512, 0), (64, 1), (0, 0)]], [1]).arrays()
    for places in ([0], [0, 512, 1024]):
        with pytest.raises(ValueError, match=f"2 requests.*got {len(places)} places"):
            _C.MemoryPlan(step, nodes, 1, places, 0)
    with pytest.raises(ValueError, match="events in order"):
        _C.MemoryPlan(step, nodes[::-1] + np.int32([2, 1, 0]), 2, [0, 512], 0)
