"""A feeder hands out batches in the loop's order, as far ahead as it may."""

import contextlib
import threading
import time
import weakref

import pytest
import torch

from tests.support.waiting import wait_until
from waterflow.executor.data.feeder import Feeder, Start

pytestmark = pytest.mark.virtual

LIMIT = 60  # seconds until a test gives up


class Fed:
    """A feeder with what it has done and a way to wait for it."""

    def __init__(self, data, prepare=None, **options):
        self.log = []
        self.ready = threading.Semaphore(0)
        settings = {"epochs": 1, "steps": None, "may_run_ahead": lambda: True}
        ahead = options.pop("ahead", 2)
        self.feeder = Feeder(
            data,
            prepare or (lambda batch, wait: batch),
            self._python,
            enter_epoch=lambda epoch: self.log.append(("epoch", epoch)),
            adopt_thread=lambda: self.log.append(("adopt", threading.current_thread().name)),
            on_ready=self.ready.release,
            name="a",
            ahead=lambda: ahead,
            **{**settings, **options},
        )
        self.feeder.start()

    def _python(self, function):
        self.log.append("python")
        return function()

    def take(self, step=True):
        wait_until(lambda: self.feeder.peek() is not None)
        fed = self.feeder.take()
        if step:
            self.feeder.step_done()
        return fed

    def all(self):
        found = []
        while True:
            fed = self.take()
            if fed.end or fed.error is not None:
                self.feeder.thread.join(LIMIT)
                return found, fed
            found.append((fed.epoch, fed.item))


def settled(feeder, count):
    """Whether so many wait to be taken, and no more come."""
    wait_until(lambda: len(feeder.ready) >= count)
    time.sleep(0.03)
    return len(feeder.ready) == count


def test_epochs_come_one_after_another_and_then_the_end():
    fed = Fed("ab", epochs=2)
    found, last = fed.all()
    assert found == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]
    assert last.end
    assert fed.log[0] == ("adopt", "waterflow-data-a")
    assert ("epoch", 0) in fed.log
    assert not fed.feeder.thread.is_alive()


def test_steps_end_it_in_the_middle_of_an_epoch():
    found, last = Fed("abc", epochs=None, steps=5).all()
    assert [item for _, item in found] == list("abcab")
    assert last.end


def test_it_fetches_ahead_as_far_as_it_may():
    fed = Fed("abcdef", ahead=3)
    assert settled(fed.feeder, 3)
    assert fed.feeder.peek().item == "a"
    fed.feeder.take()
    fed.feeder.take()
    assert settled(fed.feeder, 3)
    fed.feeder.stop()


def test_it_sleeps_until_half_of_what_it_has_is_gone():
    fed = Fed("abcdefgh", ahead=4)
    assert settled(fed.feeder, 4)
    fed.feeder.take()
    assert settled(fed.feeder, 3)
    fed.feeder.take()
    assert settled(fed.feeder, 4)
    fed.feeder.stop()


def test_an_epoch_begins_on_any_core_as_it_may_start_processes():
    roamed = []
    found, _ = Fed(
        "ab", epochs=2, roam=lambda: roamed.append(threading.current_thread().name)
    ).all()
    assert len(found) == 4
    assert roamed == ["waterflow-data-a"] * 2


def test_a_batch_that_is_taken_wakes_nobody_who_waits_for_its_step():
    asked = []
    fed = Fed("abc", may_run_ahead=lambda: bool(asked.append(0)))
    fed.ready.acquire(timeout=LIMIT)
    wait_until(lambda: fed.feeder._awaits_steps)
    before = len(asked)
    fed.take(step=False)
    assert settled(fed.feeder, 0)
    assert len(asked) == before
    fed.feeder.step_done()
    assert settled(fed.feeder, 1)
    fed.feeder.stop()


def test_it_tells_of_something_only_where_there_was_nothing():
    fed = Fed("abc", ahead=3)
    assert settled(fed.feeder, 3)
    assert fed.ready.acquire(timeout=LIMIT)
    assert not fed.ready.acquire(blocking=False)
    fed.feeder.stop()


def test_several_are_taken_as_far_as_they_fit_and_can_be_given_back():
    fed = Fed("aabb", ahead=4)
    assert settled(fed.feeder, 4)
    feeder = fed.feeder
    taken = feeder.take_while(lambda other: other.item == "a", 9)
    assert [other.item for other in taken] == ["a", "a"]
    feeder.put_back(taken[1:])
    assert [other.item for other in feeder.take_while(lambda other: True, 2)] == ["a", "b"]
    feeder.step_done(3)
    assert feeder.take().item == "b"
    feeder.step_done()
    assert settled(feeder, 1)
    assert feeder.take().end


def test_a_job_that_draws_gets_its_next_batch_after_the_step():
    fed = Fed("abc", may_run_ahead=lambda: False)
    assert settled(fed.feeder, 1)
    assert fed.take(step=False).item == "a"
    time.sleep(0.03)
    assert fed.feeder.peek() is None, "the step has not ended"
    fed.feeder.step_done()
    assert settled(fed.feeder, 1)
    fed.feeder.stop()


def test_preparing_may_wait_for_the_steps_before():
    begun = threading.Event()

    def prepare(batch, wait):
        if batch == "b":
            begun.set()
            wait()
        return batch

    fed = Fed("ab", prepare)
    assert fed.take(step=False).item == "a"
    assert begun.wait(LIMIT)
    time.sleep(0.03)
    assert fed.feeder.peek() is None
    fed.feeder.step_done()
    assert fed.take().item == "b"


def test_all_python_of_the_data_goes_through_the_job():
    fed = Fed("ab")
    fed.all()
    assert fed.log.count("python") == 1 + 2 + 1  # the iterator, two batches, their end


@pytest.mark.parametrize("where", ["iter", "next", "prepare"])
def test_an_error_is_handed_out_last(where):
    class Data:
        def __iter__(self):
            if where == "iter":
                raise KeyError(where)
            yield "a"
            if where == "next":
                raise KeyError(where)
            yield "b"

    def prepare(batch, wait):
        if where == "prepare" and batch == "b":
            raise KeyError(where)
        return batch

    found, last = Fed(Data(), prepare).all()
    assert isinstance(last.error, KeyError)
    assert [item for _, item in found] == ([] if where == "iter" else ["a"])


def test_no_data_is_an_error_with_a_hint_where_a_generator_is_used_up():
    _, last = Fed([]).all()
    assert str(last.error) == "its data yielded no batch in epoch 0"
    found, last = Fed((item for item in "a"), epochs=2).all()
    assert found == [(0, "a")]
    assert "in epoch 1 (a generator can be iterated once only" in str(last.error)


def test_an_epoch_is_entered_by_the_feeder_only_when_the_steps_before_are_done():
    fed = Fed("a", epochs=2, ahead=2)
    assert settled(fed.feeder, 2)  # the second epoch's batch came before the first one's step
    assert [entry for entry in fed.log if entry[0] == "epoch"] == [("epoch", 0)]
    fed.feeder.stop()


def test_stopping_ends_the_thread_that_waits():
    fed = Fed("abcdef")
    assert settled(fed.feeder, 2)
    assert fed.feeder.started
    fed.feeder.stop()
    fed.feeder.thread.join(LIMIT)
    assert not fed.feeder.thread.is_alive()


class Wish:
    """Wants a boundary after some numbers of steps, each once."""

    def __init__(self, *steps):
        self.steps = set(steps)

    def __call__(self, steps, most):
        return next((ahead for ahead in range(most) if steps + ahead in self.steps), most)


def test_a_boundary_comes_when_all_steps_are_done_and_nothing_is_ahead():
    drawn, wish = [], Wish(2)

    def data():
        for item in range(4):
            drawn.append(item)
            yield item

    fed = Fed(data(), before_due=wish, ahead=4)
    assert [fed.take(step=False).item for _ in range(2)] == [0, 1]
    fed.feeder.step_done()
    time.sleep(0.05)
    assert fed.feeder.peek() is None  # a step is under way
    fed.feeder.step_done()
    found = fed.take(step=False)
    assert found.boundary
    assert found.item is None
    assert drawn == [0, 1]
    assert fed.feeder.place == Start(steps=2, epoch=0, batches=2)
    time.sleep(0.05)
    assert fed.feeder.peek() is None  # it waits for whoever took it
    wish.steps.clear()
    fed.feeder.go_on()
    assert [fed.take().item for _ in range(2)] == [2, 3]
    assert fed.take().end


def test_a_boundary_after_the_last_batch_of_an_epoch_belongs_to_it():
    wish = Wish(3)
    fed = Fed([10, 20, 30], epochs=2, before_due=wish)
    for _ in range(3):
        fed.take()
    assert fed.take(step=False).boundary
    assert fed.feeder.place == Start(3, 0, 3)
    assert ("epoch", 1) not in fed.log
    wish.steps = {5}
    fed.feeder.go_on()
    assert [(each.epoch, each.item) for each in (fed.take(), fed.take())] == [(1, 10), (1, 20)]
    assert fed.take(step=False).boundary
    assert fed.feeder.place == Start(5, 1, 2)
    fed.feeder.stop()
    fed.feeder.thread.join(LIMIT)
    assert not fed.feeder.thread.is_alive()


def test_lent_work_ends_at_a_boundary():
    fed = Fed([1, 2, 3, 4], before_due=Wish(3))
    made = [fed.take(step=False).item]

    def work():
        fed.feeder.step_done()
        while (following := fed.feeder.following(lambda batch: batch)) is not None:
            made.append(following.item)
            fed.feeder.step_done()

    fed.feeder.lend(work)
    while not fed.take(step=False).boundary:
        fed.feeder.step_done()
    assert fed.feeder.place.steps == 3
    fed.feeder.stop()


@pytest.mark.parametrize("fails", [False, True])
def test_what_lent_work_knew_is_gone_while_the_thread_waits_for_more(fails):
    fed = Fed([1, 2, 3, 4], may_run_ahead=lambda: False)
    fed.take(step=False)
    known = torch.zeros(1)
    reference = weakref.ref(known)

    def work(known=known):
        if fails:
            raise KeyError(known)

    with pytest.raises(KeyError) if fails else contextlib.nullcontext():
        fed.feeder.lend(work)
    del known, work
    wait_until(lambda: reference() is None)
    fed.feeder.stop()


def test_in_lent_work_batches_are_fetched_ahead_as_far_as_nothing_is_drawn_for_them():
    """Up to the end of the epoch, of the steps, and to where somebody wants a boundary."""

    def loader():
        rows = torch.arange(20.0)
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), 2, shuffle=True)

    def run(most, **options):
        torch.manual_seed(0)
        options |= {"prepares_at_once": lambda: lambda batch: batch}
        fed = Fed(loader(), may_run_ahead=lambda: False, **options)
        first = fed.take(step=False)
        ahead = []

        def work():
            fed.feeder.fetch_undrawn(fed.feeder.undrawn(most))
            ahead.extend(fed.feeder.take_while(lambda _: True, 100))

        fed.feeder.lend(work)
        fed.feeder.stop()
        return [each.item[0].tolist() for each in (first, *ahead)]

    torch.manual_seed(0)
    alone = [batch[0].tolist() for batch in loader()]
    assert run(4) == alone[:5]
    assert run(100) == alone
    assert run(100, steps=7) == alone[:7]
    assert run(100, before_due=Wish(3)) == alone[:3]
    assert run(0) == alone[:1]


@pytest.mark.parametrize("is_known", [False, True])
def test_after_a_boundary_batches_are_fetched_ahead_once_the_step_is_known(is_known):
    """By its being done, or by whoever has looked: at the boundary anything may have changed."""
    rows = torch.utils.data.TensorDataset(torch.arange(20.0))
    loader = torch.utils.data.DataLoader(rows, 2)
    fed = Fed(loader, may_run_ahead=lambda: False, before_due=Wish(2))
    found = []

    def work():
        if is_known:
            fed.feeder.note_shown()
        found.append(fed.feeder.undrawn(100))

    fed.take()
    fed.take()
    assert fed.take(step=False).boundary
    fed.feeder.go_on()
    fed.take(step=False)
    fed.feeder.lend(work)
    fed.feeder.step_done()
    fed.take(step=False)
    fed.feeder.lend(work)
    fed.feeder.stop()
    assert found == [7 if is_known else 0, 6]


@pytest.mark.parametrize("patience", [None, 0.002])
def test_who_has_lent_work_does_not_wait_for_data_for_long(patience):
    """The work ends once the data are there, and their batch is handed out as any other."""
    arrives = threading.Event()

    def data():
        yield 1
        arrives.wait(LIMIT)
        yield 2

    fed = Fed(data(), may_run_ahead=lambda: False)
    assert fed.take(step=False).item == 1
    ends = []

    def work():
        fed.feeder.step_done()
        ends.append(fed.feeder.following(lambda batch: batch))

    if patience is None:
        threading.Timer(0.02, arrives.set).start()
    fed.feeder.lend(work, patience)
    if patience is None:
        assert [each.item for each in ends] == [2]
    else:
        assert not ends
        arrives.set()
        assert fed.take().item == 2
        assert ends == [None]
    fed.feeder.stop()


@pytest.mark.parametrize(
    ("start", "left"),
    [(Start(1, 0, 1), 5), (Start(3, 0, 3), 3), (Start(4, 1, 1), 2), (Start(6, 1, 3), 0)],
)
def test_it_goes_on_from_a_place(start, left):
    """Whoever begins the epoch leaves out what is done; limits and epochs count it."""
    begun = []

    def begin(data, epoch):
        begun.append(epoch)
        return iter(data[start.batches if len(begun) == 1 else 0 :])

    fed = Fed([1, 2, 3], epochs=2, start=start, begin=begin)
    found, last = fed.all()
    assert last.end
    assert len(found) == left
    assert begun[0] == start.epoch
    assert all(epoch == 1 for epoch, _ in found[3 - start.batches :]) or start.epoch == 1


def test_steps_done_before_count():
    found, _ = Fed([1, 2, 3], epochs=None, steps=5, start=Start(3, 1, 0)).all()
    assert found == [(1, 1), (1, 2)]
