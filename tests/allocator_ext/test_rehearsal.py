"""The rehearsal's claim: its placement is valid under every interleaving of the lanes."""

import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from waterflow.allocator_ext import _C

pytestmark = pytest.mark.virtual

Event = tuple[int, int]  # bytes (negative: a free), id
Step = list[list[Event]]  # by group
Slot = tuple[int, int, int]  # lane, step, group
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


def as_arrays(step: Step) -> Arrays:
    events = [event for group in step for event in group]
    return (
        np.array([size for size, _ in events], dtype=np.int64),
        np.array([name for _, name in events], dtype=np.int32),
        np.cumsum([len(group) for group in step], dtype=np.int32),
    )


def rehearse(
    state: _C.Allocator, steps: list[Step], jobs: list[int], pairs: list[list[Slot]]
) -> _C.RehearsalResult:
    return _C.rehearse(state, [as_arrays(step) for step in steps], jobs, pairs)


@dataclass
class Case:
    steps: list[Step]
    jobs: list[int]
    pairs: list[list[Slot]]
    lanes: int
    state: _C.Allocator


def random_step(rng: random.Random, groups: int) -> Step:
    held: list[Event] = []
    names = iter(range(10_000))
    step: Step = []
    for _ in range(groups):
        group: list[Event] = []
        for _ in range(rng.randrange(8)):
            if held and rng.random() < 0.45:
                size, name = held.pop(rng.randrange(len(held)))
                group.append((-size, name))
            else:
                held.append((rng.choice([64, 100, 640, rng.randrange(1, 4000)]), next(names)))
                group.append(held[-1])
        step.append(group)
    return step


def random_pairs(rng: random.Random, steps: list[Step], lanes: int) -> list[list[Slot]]:
    """Each pair has up to three groups of each of some steps; a step's lane changes between."""
    following = [0] * len(steps)
    pairs = []
    while any(group < len(step) for group, step in zip(following, steps, strict=True)):
        pair = []
        for index in rng.sample(range(len(steps)), rng.randint(1, len(steps))):
            lane = rng.randrange(lanes)
            for _ in range(rng.randint(1, 3)):
                if following[index] < len(steps[index]):
                    pair.append((lane, index, following[index]))
                    following[index] += 1
        pairs.append(pair)
    return pairs


def random_case(seed: int) -> Case:
    rng = random.Random(seed)
    lanes = rng.randint(1, 4)
    steps = [random_step(rng, rng.randint(1, 6)) for _ in range(rng.randint(1, 5))]
    state = _C.Allocator(1 << 17, lanes=lanes)
    for _ in range(rng.randrange(6)):  # parameters, with holes between them
        state.allocate(rng.randrange(1, 5000), 0, 9)
    for chunk in state.chunks()[:-1:2]:
        state.free(chunk.offset, 0)
    jobs = [rng.randrange(3) for _ in steps]
    return Case(steps, jobs, random_pairs(rng, steps, lanes), lanes, state)


class Replay:
    """Carries a plan out through `allocate_at`, the lanes of a pair interleaved at random."""

    def __init__(self, case: Case, plan: _C.RehearsalResult, rng: random.Random) -> None:
        self.case, self.rng = case, rng
        self.allocator = case.state.copy()
        self.allocator.record(True)
        self.allocator.reset_peaks()
        self.planned = [iter(offsets.tolist()) for offsets in plan.offsets]
        self.held: list[dict[int, int]] = [{} for _ in case.steps]

    def run(self) -> None:
        for pair in self.case.pairs:
            self.allocator.synchronize()
            queues: list[list[tuple[int, int, Event]]] = [[] for _ in range(self.case.lanes)]
            for lane, step, group in pair:
                queues[lane] += [(lane, step, event) for event in self.case.steps[step][group]]
            while any(queues):
                self.act(*self.rng.choice([queue for queue in queues if queue]).pop(0))
        self.allocator.synchronize()

    def act(self, lane: int, step: int, event: Event) -> None:
        size, name = event
        if size < 0:
            self.allocator.free(self.held[step].pop(name), lane)
            return
        offset = next(self.planned[step])
        assert self.allocator.allocate_at(offset, size, lane, self.case.jobs[step])
        self.held[step][name] = offset


@given(st.integers(0, 1 << 32))
@settings(max_examples=150, deadline=None)
def test_a_plan_holds_under_every_interleaving(seed: int) -> None:
    case = random_case(seed)
    plan = rehearse(case.state, case.steps, case.jobs, case.pairs)
    assert plan.fits, plan.why
    peaks = []
    for order in range(4):
        replay = Replay(case, plan, random.Random(order))
        replay.run()
        replay.allocator.check_consistency()
        assert replay.allocator.extent() == plan.extent
        assert _C.check_happens_before(replay.allocator.take_log(), case.lanes) == []
        peaks.append(replay.allocator.peak())
    assert max(peaks) <= plan.peak <= plan.extent
    if case.lanes == 1:
        assert peaks == [plan.peak] * 4


@given(st.integers(0, 1 << 32))
@settings(max_examples=50, deadline=None)
def test_the_extent_is_a_budget_that_suffices(seed: int) -> None:
    case = random_case(seed)
    plan = rehearse(case.state, case.steps, case.jobs, case.pairs)
    tight = case.state.copy()
    tight.synchronize()
    if tight.resize(max(plan.extent, 64)):
        again = rehearse(tight, case.steps, case.jobs, case.pairs)
        assert again.fits
        assert all(map(np.array_equal, again.offsets, plan.offsets))
    if plan.extent >= 128 and tight.resize(plan.extent - 64):
        assert not rehearse(tight, case.steps, case.jobs, case.pairs).fits


def unrolled(frames: int, groups: int) -> Step:
    """Each frame keeps small blocks; going back, three sums move to a new place at each frame."""
    names = iter(range(10 * frames))
    kept: list[list[Event]] = []
    events: list[Event] = []
    for frame in range(frames):
        kept.append([(64 * (3 + (frame + i) % 7), next(names)) for i in range(5)])
        events += kept[-1]
    sums: dict[int, int] = {}
    for frame in reversed(range(frames)):
        for size in (64 * 500, 64 * 300, 64 * 200):
            moved = next(names)
            events.append((size, moved))
            if size in sums:
                events.append((-size, sums[size]))
            sums[size] = moved
        events += [(-size, name) for size, name in kept[frame]]
    events += [(-size, name) for size, name in sums.items()]
    length = -(-len(events) // groups)
    return [events[i * length : (i + 1) * length] for i in range(groups)]


def test_a_plan_of_many_blocks_is_tight_and_holds() -> None:
    groups = 6
    steps = [unrolled(900, groups) for _ in range(2)]
    state = _C.Allocator(1 << 30, lanes=2)
    state.allocate(5000, 0, 9)
    pairs: list[list[Slot]] = [[(0, 0, 0)], [(0, 0, 1)]]
    pairs += [[(0, 0, i + 2), (1, 1, i)] for i in range(groups - 2)]
    pairs += [[(1, 1, groups - 2)], [(1, 1, groups - 1)]]
    case = Case(steps, [0, 1], pairs, 2, state)
    plan = rehearse(case.state, case.steps, case.jobs, case.pairs)
    assert sum(map(len, plan.offsets)) > 12_288  # so they are bundled
    assert plan.extent <= 1.02 * plan.peak  # largest first alone: 1.03
    Replay(case, plan, random.Random(0)).run()


def test_what_a_lane_frees_reaches_the_other_at_the_next_pair() -> None:
    falling: Step = [[(512, 0)], [(-512, 0)]]
    rising: Step = [[(512, 0)], [(256, 1)]]
    pairs: list[list[Slot]] = [[(0, 0, 0)], [(0, 0, 1), (1, 1, 0)], [(1, 1, 1)]]
    plan = rehearse(_C.Allocator(4096), [falling, rising], [0, 1], pairs)
    assert [offsets.tolist() for offsets in plan.offsets] == [[0], [512, 0]]
    assert plan.pair_peaks == [512, 1024, 768]
    assert (plan.peak, plan.extent) == (1024, 1024)


def test_one_lane_reuses_at_once() -> None:
    falling: Step = [[(512, 0)], [(-512, 0)]]
    rising: Step = [[(512, 0)]]
    pairs: list[list[Slot]] = [[(0, 0, 0)], [(0, 0, 1), (0, 1, 0)]]
    plan = rehearse(_C.Allocator(512), [falling, rising], [0, 1], pairs)
    assert plan.fits
    assert plan.peak == 512


def test_the_original_state_is_untouched() -> None:
    state = _C.Allocator(4096)
    rehearse(state, [[[(64, 0)]]], [0], [[(0, 0, 0)]])
    assert (state.live(), state.syncs()) == (0, 0)


def test_what_does_not_fit_is_told_in_a_sentence() -> None:
    steps: list[Step] = [[[(512, 0)], [(640, 1)]]]
    plan = rehearse(_C.Allocator(1024), steps, [7], [[(0, 0, 0)], [(1, 0, 1)]])
    assert not plan.fits
    assert (plan.failed_pair, plan.failed_step, plan.failed_group) == (1, 0, 1)
    assert "640 bytes do not fit on lane 1" in plan.why
    assert "job 7 holds 512" in plan.why
    assert plan.offsets[0].tolist() == [0]


def test_a_limit_counts_in_the_rehearsal() -> None:
    state = _C.Allocator(4096)
    state.set_limit(7, 512)
    plan = rehearse(state, [[[(512, 0), (64, 1)]]], [7], [[(0, 0, 0)]])
    assert not plan.fits
    assert "limit is 512" in plan.why


@pytest.mark.parametrize(
    ("pairs", "text"),
    [
        ([[(0, 0, 1)]], "group 0 is next"),
        ([[(0, 0, 0)], [(0, 0, 0)]], "group 1 is next"),
        ([[(0, 0, 0), (1, 0, 1)]], "on two lanes"),
        ([[(2, 0, 0)]], "lane 2"),
        ([[(0, 3, 0)]], "only 1 steps"),
        ([[(0, 0, 0), (0, 0, 1), (0, 0, 2)]], "does not hold"),
        ([[(0, 0, g) for g in range(4)]], "does not hold"),
    ],
)
def test_broken_schedules_are_refused(pairs: list[list[Slot]], text: str) -> None:
    step: Step = [[(64, 0)], [(-64, 0)], [(-64, 0)]]
    with pytest.raises(ValueError, match=text):
        rehearse(_C.Allocator(4096), [step], [0], pairs)


def test_broken_steps_are_refused() -> None:
    for step, text in [([[(0, 0)]], "0 bytes"), ([[(64, 0), (64, 0)]], "twice")]:
        with pytest.raises(ValueError, match=text):
            rehearse(_C.Allocator(4096), [step], [0], [[(0, 0, 0)]])
    bad_ends = (np.array([64]), np.array([0], np.int32), np.array([2], np.int32))
    with pytest.raises(ValueError, match="group ends"):
        _C.rehearse(_C.Allocator(4096), [bad_ends], [0], [[(0, 0, 0)]])
    with pytest.raises(ValueError, match="one job for each step"):
        _C.rehearse(_C.Allocator(4096), [], [0], [])
