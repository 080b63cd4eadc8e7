"""Jobs that rest: their memory is the others', their numbers are those of a job that did not."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import waterflow as wf
from tests.support.differences import assert_equal_to_eager
from tests.support.needs import needed
from waterflow.engine.events import MemoryMoved, StateChanged
from waterflow.engine.states import JobState

pytestmark = pytest.mark.cpu

DIGITS = load_digits()
IMAGES = torch.tensor(DIGITS.images[:320], dtype=torch.float32).unsqueeze(1) / 16
LABELS = torch.tensor(DIGITS.target[:320])


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def make_job(name: str, seed: int = 0, **options: Any) -> wf.Job:
    """A job that draws, counts in buffers, shuffles, and has a scheduler."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 4 + seed, 3, padding=1),
        nn.BatchNorm2d(4 + seed),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(64 * (4 + seed), 10),
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    settings: dict[str, Any] = {
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.5),
        "data": DataLoader(TensorDataset(IMAGES, LABELS), 32, shuffle=True),
        "epochs": 3,
        "seed": seed,
        **options,
    }
    return wf.Job(name, model=model, optimizer=optimizer, loss=cross_entropy, **settings)


class Stops:
    """Has a job tell when it has made so many steps, and lets nobody miss it."""

    def __init__(self, *steps: int) -> None:
        self.reached = {step: threading.Event() for step in steps}
        self.gone_on = {step: threading.Event() for step in steps}

    def __call__(self, result: wf.StepResult) -> None:
        if result.step in self.reached:
            self.reached[result.step].set()
            assert self.gone_on[result.step].wait(300)

    @contextlib.contextmanager
    def at(self, step: int):
        assert self.reached[step].wait(300)
        try:
            yield
        finally:
            self.gone_on[step].set()


@pytest.mark.parametrize("policy", ["flow", "temporal", "waterwave"])
@pytest.mark.parametrize("capture", [True, False, "auto"])
def test_a_job_that_rests_has_the_numbers_of_one_that_does_not(policy: str, capture: Any) -> None:
    stops = Stops(4, 17)
    resting = make_job("resting", 1, on_step=stops, capture=capture)
    beside = make_job("beside", 2, capture=capture)
    with wf.Engine("64MiB", policy=policy, threads=1) as engine:
        held: dict[str, list[int]] = {"resting": [], "beside": []}
        engine.subscribe(
            lambda event: (
                held[event.job].append(event.held) if isinstance(event, MemoryMoved) else None
            )
        )
        first, second = engine.submit(resting), engine.submit(beside)
        for step in (4, 17):
            with stops.at(step):
                first.suspend()
            assert first.suspend(timeout=300)
            assert first.status == "suspended"
            assert len(first.losses) == step
            assert held["resting"][-1] == 0
            first.resume()
        assert first.result(300).state == second.result(300).state == "finished"
    assert len(held["resting"]) == 6
    assert_equal_to_eager(resting, first.result(), make_job("resting", 1))
    assert_equal_to_eager(beside, second.result(), make_job("beside", 2))


def test_who_waits_for_room_has_it_while_another_rests() -> None:
    stops = Stops(3)
    first = make_job("first", 1, on_step=stops, epochs=1, capture=True)
    second = make_job("second", 1, epochs=1, capture=True)
    alone = needed(make_job("first", 1, capture=True))
    with wf.Engine(alone + alone // 8, threads=1) as engine:
        engine.hold()  # so that they are admitted in their order
        one, other = engine.submit(first), engine.submit(second)
        engine.release()
        with stops.at(3):
            assert other.status == "queued"
            one.suspend()
        assert other.result(300).state == "finished"
        assert one.status == "suspended"
        one.resume()
        assert one.result(300).state == "finished"
        assert engine.report().peak_bytes <= alone + alone // 8
    assert_equal_to_eager(first, one.result(), make_job("first", 1, epochs=1))
    assert_equal_to_eager(second, other.result(), make_job("second", 1, epochs=1))


def test_one_that_has_not_begun_rests_too_and_closing_resumes() -> None:
    job = make_job("a", epochs=1)
    states: list[JobState] = []
    with wf.Engine("64MiB", threads=1) as engine:
        engine.subscribe(
            lambda event: states.append(event.after) if isinstance(event, StateChanged) else None
        )
        engine.hold()
        handle = engine.submit(job)
        assert handle.suspend(timeout=300)
        engine.release()
        assert handle.status == "suspended"
        assert not handle.losses
    assert handle.status == "finished"
    assert states[-4:] == [
        JobState.SUSPENDED,
        JobState.RESUMING,
        JobState.RUNNING,
        JobState.FINISHED,
    ]
    assert_equal_to_eager(job, handle.result(), make_job("a", epochs=1))


def test_a_job_suspends_itself_in_its_callback() -> None:
    handles: list[wf.JobHandle] = []
    rests = threading.Event()

    def rest(result: wf.StepResult) -> None:
        if result.step == 5:
            assert not handles[0].suspend()

    def note(event: Any) -> None:
        if isinstance(event, StateChanged) and event.after is JobState.SUSPENDED:
            rests.set()

    job = make_job("a", epochs=1, on_step=rest)
    with wf.Engine("64MiB", threads=1) as engine:
        engine.subscribe(note)
        engine.hold()
        handles.append(engine.submit(job))
        engine.release()
        assert rests.wait(300)
        assert len(handles[0].losses) == 5
        handles[0].resume()
    assert_equal_to_eager(job, handles[0].result(), make_job("a", epochs=1))


def test_a_job_that_rests_can_be_stopped() -> None:
    stops = Stops(4)
    job = make_job("a", on_step=stops)
    with wf.Engine("64MiB", threads=1) as engine:
        handle = engine.submit(job)
        with stops.at(4):
            handle.suspend()
        assert handle.suspend(timeout=300)
        handle.stop()
        assert handle.result(300).state == "stopped"
        assert len(handle.losses) == 4
        for verb in (handle.suspend, handle.resume):
            with pytest.raises(wf.JobError, match=r"job 'a' is stopped and cannot be"):
                verb()


def test_resumed_at_the_very_moment_at_which_it_was_suspended() -> None:
    stops = Stops(4)
    job = make_job("a", 1, on_step=stops)
    handles: list[wf.JobHandle] = []
    moments = 0

    def resume(event: Any) -> None:
        nonlocal moments
        if isinstance(event, StateChanged) and event.after is JobState.SUSPENDED:
            moments += 1
            handles[0].resume()

    with wf.Engine("64MiB", threads=1) as engine:
        engine.subscribe(resume)
        handles.append(engine.submit(job))
        with stops.at(4):
            handles[0].suspend()
        assert handles[0].result(300).state == "finished"
    assert moments == 1
    assert_equal_to_eager(job, handles[0].result(), make_job("a", 1))


@pytest.mark.parametrize("capture", [True, False])
def test_wishes_that_change_faster_than_they_are_granted(capture: bool) -> None:
    """Whoever asks does not wait for the engine, which is between any two of its actions then."""
    jobs = [make_job(name, seed, epochs=40, capture=capture) for name, seed in (("a", 1), ("b", 2))]
    with wf.Engine("64MiB", threads=1) as engine:
        handles = [engine.submit(job) for job in jobs]
        asked = 0
        while all(handle.status not in ("finished", "failed") for handle in handles):
            handle = handles[asked // 2 % 2]
            with contextlib.suppress(wf.JobError):  # it may have ended since
                (handle.resume if asked % 2 else handle.suspend)()
            asked += 1
            if asked % 8 == 0:
                time.sleep(0.002)
        for handle in handles:
            with contextlib.suppress(wf.JobError):
                handle.resume()
        for handle in handles:
            handle.result(300)
    assert asked > 20
    for job, handle, seed in zip(jobs, handles, (1, 2), strict=True):
        assert_equal_to_eager(job, handle.result(), make_job(job.name, seed, epochs=40))


def test_gradients_of_a_job_that_rests_stay() -> None:
    """A frozen layer's gradient is nobody's to drop: the loop would add to it for ever."""
    stops = Stops(3)

    def make(**options: Any) -> wf.Job:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))
        optimizer = torch.optim.SGD(model[3].parameters(), 0.1)  # the first layer only gathers
        loader = DataLoader(TensorDataset(IMAGES, LABELS), 32)
        options = {"epochs": 1, "seed": 0, **options}
        return wf.Job(
            "a", model=model, optimizer=optimizer, loss=cross_entropy, data=loader, **options
        )

    job, fresh = make(on_step=stops, keep_grads=True), make(keep_grads=True)
    with wf.Engine("64MiB", threads=1) as engine:
        handle = engine.submit(job)
        with stops.at(3):
            handle.suspend()
        assert handle.suspend(timeout=300)
        handle.resume()
    assert_equal_to_eager(job, handle.result(), fresh)
    gathered, expected = job.model[1].weight.grad, fresh.model[1].weight.grad
    assert gathered is not None
    assert expected is not None
    assert torch.equal(gathered, expected)
