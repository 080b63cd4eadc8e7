"""What an engine tells of a run: complete, in order, and the same as its report."""

from __future__ import annotations

import contextvars
import itertools
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import waterflow as wf
from tests.support.data import cross_entropy, pairs
from waterflow.engine.events import (
    CaptureKnown,
    EagerStepBegun,
    EngineEnded,
    EpochEntered,
    Event,
    EventStream,
    GroupsRan,
    JobJoined,
    MemoryMoved,
    NeedsKnown,
    StateChanged,
    StepChecked,
    StepDone,
    TrainRan,
)
from waterflow.engine.states import JobState

STEPS = 5


def make_job(name: str, **options: Any) -> wf.Job:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    settings = {"data": pairs(), "steps": STEPS, "seed": 0, **options}
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    return wf.Job(name, model=model, optimizer=optimizer, loss=cross_entropy, **settings)


def events_of(
    *jobs: wf.Job, memory: str = "64MiB", policy: str = "flow"
) -> tuple[list[Event], wf.Report]:
    events: list[Event] = []
    with wf.Engine(memory, policy=policy, threads=1) as engine:
        engine.subscribe(events.append)
        for job in jobs:
            engine.submit(job)
    return events, engine.report()


def of(events: list[Event], kind: type, job: str) -> list[Any]:
    return [event for event in events if isinstance(event, kind) and event.job == job]


def states(events: list[Event], job: str) -> list[JobState]:
    changes = of(events, StateChanged, job)
    for before, after in itertools.pairwise(changes):
        assert before.after is after.before
    return [changes[0].before, *(change.after for change in changes)]


@pytest.mark.virtual
def test_subscribers_hear_all_in_the_order_of_their_subscription() -> None:
    stream, heard = EventStream(), []
    stream.subscribe(lambda event: heard.append(("a", event)))
    first, second = EngineEnded(), MemoryMoved("x", 1)
    stream.publish(first)
    stream.subscribe(lambda event: heard.append(("b", event)))
    stream.publish(second)
    assert heard == [("a", first), ("a", second), ("b", second)]


@pytest.mark.cpu
@pytest.mark.parametrize("policy", ["flow", "temporal", "waterwave"])
def test_a_run_as_events_is_the_run_as_its_report(policy: str) -> None:
    epochs = {"data": pairs(sizes=(4, 4, 4)), "epochs": 2, "steps": None}
    events, report = events_of(make_job("a"), make_job("b", **epochs), policy=policy)
    for name in "ab":
        job = report.jobs[name]
        done = of(events, StepDone, name)
        assert [event.step for event in done] == list(range(1, job.steps + 1))
        assert [event.loss for event in done] == job.losses
        assert states(events, name) == [
            JobState.QUEUED,
            JobState.PREPARING,
            JobState.RUNNING,
            JobState.FINISHED,
        ]
        assert len(of(events, EagerStepBegun, name)) == job.eager_steps
        assert len(of(events, StepChecked, name)) == job.checks > 0
        assert [event.number for event in of(events, JobJoined, name)] == ["ab".index(name)]
        assert of(events, NeedsKnown, name)[-1].persistent_bytes == job.persistent_bytes
        assert of(events, CaptureKnown, name)[-1].captured == job.captured == "captured"
        assert [event.epoch for event in of(events, EpochEntered, name)] == [1, 2][: job.epochs]
    assert report.jobs["b"].epochs == 2
    assert isinstance(events[-1], EngineEnded)


@pytest.mark.cpu
def test_memory_comes_before_the_first_step_and_goes_after_the_last() -> None:
    events, _ = events_of(make_job("a"))
    places = [place for place, event in enumerate(events) if isinstance(event, MemoryMoved)]
    steps = [place for place, event in enumerate(events) if isinstance(event, StepDone)]
    came, went = (events[places[0]], events[places[-1]])
    assert places[0] < steps[0]
    assert steps[-1] < places[-1]
    assert came.held > 0  # type: ignore[union-attr]
    assert went == MemoryMoved("a", 0)


@pytest.mark.cpu
def test_every_group_is_told_of_before_its_step_is_done() -> None:
    events, _ = events_of(make_job("a"), make_job("b"))
    ran = dict.fromkeys("ab", 0)
    done = dict.fromkeys("ab", 0)
    for event in events:
        if isinstance(event, GroupsRan):
            for name in event.jobs:
                ran[name] += 1
            assert all(start <= stop for *_, start, stop in event.spans)
        elif isinstance(event, StepDone):
            done[event.job] += 1
            assert ran[event.job] >= done[event.job]
    assert done == dict.fromkeys("ab", STEPS)


@pytest.mark.cpu
def test_an_error_ends_one_job_and_says_which() -> None:
    def broken(result: wf.StepResult) -> None:
        if result.step == 3:
            raise ValueError("enough")

    events, report = events_of(make_job("a", on_step=broken), make_job("b"))
    (failed,) = [event for event in of(events, StateChanged, "a") if event.error is not None]
    assert failed.after is JobState.FAILED
    assert failed.error is report.jobs["a"].exception
    assert len(of(events, StepDone, "a")) == 3
    assert states(events, "b")[-1] is JobState.FINISHED


@pytest.mark.cpu
def test_a_job_that_waits_for_room_is_queued_again() -> None:
    events: list[Event] = []
    waits = threading.Event()

    def note(event: Event) -> None:
        events.append(event)
        if isinstance(event, StateChanged):
            change = event.before, event.after
            if change == (JobState.PREPARING, JobState.QUEUED):
                waits.set()

    def until_one_waits(step: wf.StepResult) -> Any:
        return wf.STOP if waits.is_set() else None

    need = wf.run([make_job("a")], memory="64MiB").jobs["a"].solo_peak_bytes
    assert need is not None
    with wf.Engine(str(need), threads=1) as engine:
        engine.subscribe(note)
        for name in "ab":
            engine.submit(make_job(name, steps=10**6, on_step=until_one_waits))
    assert {job.state for job in engine.report().jobs.values()} == {"stopped"}
    late = next(name for name in "ab" if JobState.QUEUED in states(events, name)[1:])
    assert states(events, late)[1:4] == [JobState.PREPARING, JobState.QUEUED, JobState.RUNNING]


@pytest.mark.cpu
def test_a_subscriber_that_raises_hears_no_more_and_ends_no_job() -> None:
    heard: list[Event] = []

    def broken(event: Event) -> None:
        heard.append(event)
        if isinstance(event, StepDone):
            raise ValueError("enough")

    with wf.Engine("64MiB", threads=1) as engine:
        engine.subscribe(broken)
        with pytest.warns(RuntimeWarning, match="enough.*hears no more"):
            report = engine.submit(make_job("a")).result()
    assert report.state == "finished"
    assert report.steps == STEPS
    assert isinstance(heard[-1], StepDone)
    assert heard[-1].step == 1


@pytest.mark.cpu
def test_a_subscriber_of_some_kinds_hears_of_no_others() -> None:
    """And does not have the steps told of one by one, which he has not asked for."""
    ends: list[Event] = []
    trains: list[Any] = []
    with wf.Engine("64MiB", threads=1) as engine:
        engine.subscribe(ends.append, StateChanged, EngineEnded)
        engine.subscribe(trains.append, TrainRan)
        report = engine.submit(make_job("a", capture=True)).result()
    assert {type(event) for event in ends} == {StateChanged, EngineEnded}
    assert states(ends, "a")[-1] is JobState.FINISHED
    assert {type(event) for event in trains} == {TrainRan}
    told = [loss for train in trains for loss in train.losses]
    assert told == report.losses[-len(told) :]


@pytest.mark.cpu
def test_what_is_no_kind_of_event_is_refused() -> None:
    with (
        wf.Engine("64MiB", threads=1) as engine,
        pytest.raises(TypeError, match="'StepDone' is no kind of event"),
    ):
        engine.subscribe(print, "StepDone")  # type: ignore[arg-type]


@pytest.mark.cpu
def test_jobs_that_are_held_back_begin_together_or_when_the_engine_closes() -> None:
    events: list[Event] = []
    with wf.Engine("64MiB", threads=1) as engine:
        engine.subscribe(events.append)
        engine.hold()
        handles = [engine.submit(make_job(name)) for name in "ab"]
        engine.release()
        assert [handle.result().state for handle in handles] == ["finished"] * 2
        engine.hold()
        last = engine.submit(make_job("c"))
    assert last.status == "finished"
    began = [
        event.job
        for event in events
        if isinstance(event, StateChanged) and event.after is JobState.RUNNING
    ]
    prepared = [event.job for event in events if isinstance(event, StateChanged)][:2]
    assert sorted(prepared) == ["a", "b"]
    assert began == ["a", "b", "c"]


@pytest.mark.cpu
def test_a_job_that_is_stopped_while_it_is_held_back_never_begins() -> None:
    events: list[Event] = []
    with wf.Engine("64MiB", threads=1) as engine:
        engine.subscribe(events.append)
        engine.hold()
        handle = engine.submit(make_job("a"))
        handle.stop()
    assert handle.status == "stopped"
    assert JobState.RUNNING not in states(events, "a")


class Noisy(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Draws from the streams of `random` and numpy, as augmentation does."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = random.random() + float(np.random.rand())
        return torch.full((4,), index * noise / 16), torch.tensor(index % 3)


def draw(event: Event) -> None:
    random.random()
    np.random.rand()
    torch.rand(1)


def switch_gradients(event: Event) -> None:
    if threading.current_thread() is not threading.main_thread():
        torch.set_grad_enabled(False)


def set_threads(event: Event) -> None:
    if threading.current_thread() is not threading.main_thread():
        torch.set_num_threads(2)


VARIABLE = contextvars.ContextVar("VARIABLE", default=1.0)


def set_variable(event: Event) -> None:
    VARIABLE.set(VARIABLE.get() + 1)


def scaled(model: nn.Module, batch: Any) -> torch.Tensor:
    return cross_entropy(model, batch) * VARIABLE.get()


@pytest.mark.parametrize("on_step", [None, lambda step: None], ids=["", "callback"])
@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("watch", [draw, switch_gradients, set_threads, set_variable])
def test_whoever_watches_changes_nothing(watch: Any, capture: bool, on_step: Any) -> None:
    """A subscriber is called on the threads of jobs, in the middle of their own Python."""

    def make() -> wf.Job:
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        data = torch.utils.data.DataLoader(Noisy(), batch_size=4, shuffle=True)
        options: dict[str, Any] = {"capture": capture, "on_step": on_step}
        return wf.Job(
            "a", model=model, optimizer=optimizer, loss=scaled, data=data, epochs=3, **options
        )

    expected = wf.run_eager(make(), threads=1).losses
    with wf.Engine("64MiB", threads=1) as engine:
        engine.subscribe(watch)
        handle = engine.submit(make())
    assert handle.result().losses == expected
