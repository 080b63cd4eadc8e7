"""When a capture pays: decided from what steps and captures have taken so far."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.engine_parts import make_job
from waterflow.steps.tiers import CaptureCosts, Tiers, guess_need

pytestmark = pytest.mark.cpu

ROOMY = 1 << 30
SHAPE = "a signature"


def tiers_of(costs: CaptureCosts | None = None, budget: int = ROOMY, **options) -> Tiers:
    job = make_job("a", **{"steps": 1000, **options})
    made = Tiers(job, costs or CaptureCosts(lanes=2), budget)
    made.meet(parameters=1 << 10, batch=1 << 10)
    return made


def take(tiers: Tiers, steps: int, seconds: float, tensors: int = 100, shape=SHAPE) -> None:
    """Eager steps on batches of a shape."""
    for _ in range(steps):
        tiers.note_begun()
        tiers.note_step(shape, seconds, tensors)


def test_a_job_begins_with_eager_steps_and_a_few_are_no_reason_to_change():
    tiers = tiers_of()
    assert tiers.stays_eager(SHAPE)
    take(tiers, 1, seconds=1.0)
    assert tiers.stays_eager(SHAPE), "the first step is not like the others"


def test_a_capture_has_to_save_more_than_it_takes():
    long, short = tiers_of(steps=100_000), tiers_of(steps=20)
    for tiers in (long, short):
        take(tiers, 15, seconds=0.005)
    assert not long.stays_eager(SHAPE)
    assert short.stays_eager(SHAPE)
    assert "captured after 15 eager steps" in long.reasons()[0]
    assert "does not pay" in short.reasons()[0]


def test_what_was_decided_for_a_capture_stays():
    tiers = tiers_of(steps=100_000)
    take(tiers, 100, seconds=0.001)
    assert not tiers.stays_eager(SHAPE)
    take(tiers, 99_900, seconds=0.001)
    assert not tiers.stays_eager(SHAPE)


def test_shapes_that_come_once_stay_eager_and_hot_ones_are_captured():
    tiers = tiers_of(steps=10_000)
    for number in range(200):
        take(tiers, 1, seconds=0.001, shape=number)
        take(tiers, 3, seconds=0.001, shape="hot")
    assert not tiers.stays_eager("hot")
    assert all(tiers.stays_eager(number) for number in range(200))
    assert len(tiers.reasons()) == 201


def test_jobs_whose_captures_may_be_shared_decide_together():
    alone, costs = tiers_of(steps=150), CaptureCosts(lanes=2)
    together = [tiers_of(costs, steps=150) for _ in range(64)]
    take(alone, 8, seconds=0.002, tensors=400)
    take(together[0], 8, seconds=0.002, tensors=400)
    assert alone.stays_eager(SHAPE)
    assert not together[0].stays_eager(SHAPE)
    for tiers in together[1:]:
        tiers.close()
    take(together[1], 8, seconds=0.002, tensors=400)
    assert together[1].stays_eager(SHAPE), "the others have ended"


def test_without_a_known_end_as_many_steps_are_expected_as_were_made():
    def endless():
        yield from ()

    tiers = tiers_of(steps=None, epochs=5, data=endless())
    take(tiers, 10, seconds=0.001)
    assert tiers.remaining == 10
    assert tiers.stays_eager(SHAPE)
    take(tiers, 9_990, seconds=0.001)
    assert not tiers.stays_eager(SHAPE)


def test_before_a_long_capture_eager_steps_have_taken_a_part_of_what_it_takes():
    tiers = tiers_of(steps=10**9)
    cost = tiers.costs.cost(0, 4_000, jobs=1).seconds
    take(tiers, int(0.08 * cost / 0.02), seconds=0.02, tensors=4_000)
    assert tiers.stays_eager(SHAPE)
    assert "before steps have taken a tenth of that" in tiers.reasons()[0]
    take(tiers, int(0.08 * cost / 0.02), seconds=0.02, tensors=4_000)
    assert not tiers.stays_eager(SHAPE)


def test_a_short_capture_that_pays_waits_for_no_more_than_measured_steps():
    tiers = tiers_of(steps=10**9)
    assert tiers.costs.cost(0, 100, jobs=1).seconds < 0.06
    take(tiers, 2, seconds=0.0005)
    assert not tiers.stays_eager(SHAPE)


def test_one_long_step_is_not_taken_for_the_rule():
    tiers = tiers_of(steps=200)
    take(tiers, 1, seconds=0.001)
    take(tiers, 1, seconds=1.0)
    take(tiers, 50, seconds=0.0001)
    assert tiers.stays_eager(SHAPE)


def test_one_long_step_of_one_of_many_is_not_taken_for_the_rule_either():
    """Of hundreds of jobs the first step of some always takes long."""
    costs = CaptureCosts(lanes=1)
    many = [tiers_of(costs, steps=20) for _ in range(200)]
    for tiers in many:
        take(tiers, 1, seconds=0.001)
    take(many[0], 1, seconds=0.05)
    assert many[0].stays_eager(SHAPE)
    for tiers in many[1:3]:
        take(tiers, 1, seconds=0.0005)
    assert many[0].stays_eager(SHAPE)
    many[0].note_capture(SHAPE, seconds=0.1, shared=False)
    assert many[5].stays_eager(SHAPE), "others do not join what does not pay for them"


def test_to_join_a_capture_takes_more_than_to_find_it():
    costs = CaptureCosts(lanes=1)
    tiers = tiers_of(costs)
    for _ in range(1000):
        tiers.note_capture(SHAPE, seconds=0.005, shared=True)
    costs.note_capture(tensors=100, seconds=0.1, sight="it")
    assert costs.cost(0, 100, "it").seconds == pytest.approx(0.0125, rel=0.01)


def test_how_long_jobs_last_is_learnt_from_those_that_have_ended():
    costs = CaptureCosts(lanes=1)
    assert tiers_of(costs).remaining == 1000
    for _ in range(99):  # as a search does that prunes most of its trials
        pruned = tiers_of(costs)
        take(pruned, 250, seconds=0.001)
        pruned.close()
    now = tiers_of(costs)
    assert now.remaining == pytest.approx(250, rel=0.1)
    take(now, 100, seconds=0.001)
    assert now.remaining == pytest.approx(150, rel=0.1)
    take(now, 200, seconds=0.001)
    assert now.remaining == 700, "none has ended later but in the expectation of a whole one"
    take(now, 700, seconds=0.001)
    assert now.remaining == 0


@given(ends=st.lists(st.floats(0, 1), max_size=100), made=st.floats(0, 1))
def test_what_is_to_come_is_never_more_than_there_is(ends, made):
    costs = CaptureCosts(lanes=1)
    for end in ends:
        costs.leave(costs.join("kind"), end)
    assert -1e-9 <= costs.expected(made) <= 1 - made + 1e-9


def test_costs_are_learnt_from_captures_and_joins_before():
    costs = CaptureCosts(lanes=1)
    capture, joins = costs.cost(0, 100)
    assert costs.cost(0, 100, jobs=2) == (capture, 2 * joins)
    costs.note_capture(tensors=100, seconds=10 * capture, sight="it")
    assert costs.cost(0, 100).capture == pytest.approx(capture), (
        "of a process the first takes longer"
    )
    costs.note_capture(tensors=100, seconds=3 * capture, sight="that")
    assert costs.cost(0, 100).capture == pytest.approx(3 * capture)
    for _ in range(1000):
        costs.note_join(0.005)
    assert costs.cost(0, 100, "it") == (0.0, pytest.approx(0.005, rel=0.01))
    assert costs.cost(0, 100, "another").seconds > 3 * capture


def test_what_captured_steps_bring_is_learnt_from_them():
    costs = CaptureCosts(lanes=1)
    guessed = costs.saved_seconds(0.001, 50, beside=False)
    assert 0 < guessed < 0.001
    costs.note_steps(eager=100.0, captured=10.0)
    assert costs.saved_seconds(0.001, 50, beside=False) == pytest.approx(0.001, rel=0.01)


def test_a_captured_step_brings_less_where_each_is_a_train_of_its_own():
    costs = CaptureCosts(lanes=1)
    alone, ten, many = (costs.saved_seconds(0.001, 50, beside=False, train=n) for n in (1, 10, 1e9))
    assert alone < ten < many == pytest.approx(costs.saved_seconds(0.001, 50, beside=False))


@pytest.mark.parametrize(("together", "captured"), [(1, False), (50, True)])
def test_short_steps_of_shapes_that_come_in_turn_stay_eager(together, captured):
    tiers = tiers_of(CaptureCosts(lanes=2), steps=400)
    for number in range(200):
        shape = ("shape", number // together % 2)
        if not tiers.stays_eager(shape):
            break
        take(tiers, 1, seconds=0.0003, shape=shape)
    assert (number < 199) == captured


def test_one_bad_moment_does_not_decide_for_good():
    """A captured step that took long once, on cold memory, says little about the next ones."""
    costs = CaptureCosts(lanes=1)
    costs.note_steps(eager=0.001, captured=0.02)
    assert costs.saved_seconds(0.001, 50, beside=False) > 0


def test_who_can_join_a_capture_does_so_after_one_step_where_that_pays():
    costs = CaptureCosts(lanes=2)
    first = tiers_of(costs)
    take(first, 20, seconds=0.002)
    assert not first.stays_eager(SHAPE)
    first.note_capture(SHAPE, seconds=0.1, shared=False)
    later, short = tiers_of(costs), tiers_of(costs, steps=5)
    for tiers in (later, short):
        assert tiers.stays_eager(SHAPE), "the first step makes the optimizer's state"
        take(tiers, 1, seconds=0.002)
    assert not later.stays_eager(SHAPE)
    assert short.stays_eager(SHAPE), "it is about to end"
    later.note_capture(SHAPE, seconds=0.1, shared=False)  # it could not be joined after all
    again = tiers_of(costs)
    take(again, 1, seconds=0.002)
    assert again.stays_eager(SHAPE)


def test_a_capture_that_saves_nothing_is_never_made():
    costs = CaptureCosts(lanes=1)
    costs.note_steps(eager=1000.0, captured=1200.0)
    tiers = tiers_of(costs, steps=10**9)
    take(tiers, 1000, seconds=0.001)
    assert tiers.stays_eager(SHAPE)


def test_jobs_that_may_join_a_capture_do_not_wait_for_it_to_pay_anew():
    costs = CaptureCosts(lanes=2)
    first = tiers_of(costs, steps=100)
    take(first, 15, seconds=0.001)
    assert first.stays_eager(SHAPE)
    first.note_capture(SHAPE, seconds=0.4, shared=False)
    second = tiers_of(costs, steps=100)
    take(second, 15, seconds=0.001)
    assert not second.stays_eager(SHAPE)


def test_a_job_that_may_fill_the_budget_is_captured_first():
    need = guess_need(parameters=1 << 10, batch=1 << 10).alone_bytes
    assert tiers_of(budget=3 * need).stays_eager(SHAPE)
    tight = tiers_of(budget=3 * need - 1)
    assert not tight.stays_eager(SHAPE)
    assert "the budget of" in tight.reasons()[0]


def test_a_job_whose_steps_need_much_of_the_budget_is_captured_from_then_on():
    tiers = tiers_of(budget=1 << 20)
    take(tiers, 1, seconds=0.001)
    tiers.note_need(1 << 17)
    assert tiers.stays_eager(SHAPE)
    tiers.note_need(1 << 19)
    assert not tiers.stays_eager(SHAPE)


def test_steps_that_pay_for_a_capture_are_as_many_as_it_costs_of_what_one_saves():
    tiers = tiers_of(steps=1000)
    assert tiers.runs_to_pay(SHAPE) == 0.0, "nothing is known of such steps"
    take(tiers, 8, seconds=0.002)
    few = tiers.runs_to_pay(SHAPE)
    for _ in range(3):
        tiers.costs.note_join(10.0)  # what is slow to join
    assert 8 < few < tiers.runs_to_pay(SHAPE)
    larger = tiers_of(steps=1000)
    take(larger, 8, seconds=0.2, tensors=1000)
    assert 8 < larger.runs_to_pay(SHAPE) < few
    tiers.insists = True
    assert tiers.runs_to_pay(SHAPE) == 0.0, "its steps are to be captured, whether that pays or not"


def test_jobs_that_are_to_come_count_as_those_before_them():
    costs = CaptureCosts(lanes=2)
    first = tiers_of(costs, steps=150)
    take(first, 8, seconds=0.002, tensors=400)
    assert first.stays_eager(SHAPE)
    costs.expect(63)
    other = tiers_of(costs, steps=50, data=[])
    take(first, 8, seconds=0.002, tensors=400)
    assert not first.stays_eager(SHAPE)
    costs.expect(0)
    take(other, 8, seconds=0.002, tensors=400)
    assert other.stays_eager(SHAPE)


def test_of_the_jobs_to_come_each_kind_has_its_share():
    costs = CaptureCosts(lanes=2)
    assert costs.to_come(0) == 0
    often, *again, seldom = [costs.join(kind) for kind in ("often", "often", "often", "seldom")]
    assert again == [often, often]
    costs.leave(often)
    costs.expect(40)
    assert costs.to_come(often) == 30
    assert costs.to_come(seldom) == 10
    assert costs.to_come(seldom + 1) == 0


def test_a_capture_that_turns_out_to_need_long_looks_is_weighed_again():
    costs = CaptureCosts(lanes=2)
    short, middling, long = (tiers_of(costs, steps=steps) for steps in (400, 400, 10**6))
    for tiers in (short, middling, long):
        take(tiers, 4, seconds=0.002, tensors=400)
        assert not tiers.stays_eager(SHAPE)
    assert not short.gives_up_capture(SHAPE, 0.001), "such a look is usual"
    assert middling.gives_up_capture(SHAPE, 0.3)
    assert middling.stays_eager(SHAPE)
    assert "does not pay" in middling.reasons()[0]
    assert not long.gives_up_capture(SHAPE, 0.3)
    later = tiers_of(costs, steps=400)
    take(later, 4, seconds=0.002, tensors=400)
    assert later.stays_eager(SHAPE), "the look is known"


def test_who_has_to_be_captured_is_not_asked_what_that_takes():
    tiers = tiers_of(steps=400)
    take(tiers, 4, seconds=0.002, tensors=400)
    tiers.insists = True
    assert not tiers.gives_up_capture(SHAPE, 10.0)
    assert tiers.longest_look(SHAPE) == math.inf


@pytest.mark.parametrize("alike", [1, 4])
@pytest.mark.parametrize("steps", [400, 4000])
def test_a_look_that_takes_longer_than_the_longest_has_the_capture_given_up(steps, alike):
    def tiers():
        costs = CaptureCosts(lanes=2)
        made = [tiers_of(costs, steps=steps) for _ in range(alike)]
        take(made[0], 4, seconds=0.002, tensors=400)
        return made[0]

    longest = tiers().longest_look(SHAPE)
    assert 0 < longest < math.inf
    assert tiers().gives_up_capture(SHAPE, longest + 1e-6)
    assert tiers().longest_look("another shape") == math.inf
