"""Trains of steps: the numbers of the loop, and whatever somebody wants in between."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import waterflow as wf
from tests.support.tables import crossed
from tests.support.waiting import wait_until
from waterflow.capture.caller import CallerContext
from waterflow.engine import job_run, trains
from waterflow.engine.events import EagerStepBegun, GroupsRan, StepDone

pytestmark = pytest.mark.cpu

ENDLESS = 10**9


class Scaled(nn.Linear):
    """A linear layer with a number of its own."""

    gain = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.gain


def batches(count: int, size: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(size, 8, generator=generator), torch.randint(4, (size,), generator=generator))
        for _ in range(count)
    ]


def make_job(name: str = "a", every: str | None = None, **options: Any) -> wf.Job:
    torch.manual_seed(5)
    model = Scaled(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings: dict[str, Any] = {"data": batches(7), "seed": 0, **options}
    if every is not None:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
        settings.update(scheduler=scheduler, scheduler_every=every)
    loss = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    return wf.Job(name, model=model, optimizer=optimizer, loss=loss, **settings)


def assert_equal(job: wf.Job, report: wf.JobReport, fresh: wf.Job) -> None:
    assert report.error is None
    assert report.losses == wf.run_eager(fresh, threads=1).losses
    assert all(map(torch.equal, job.model.parameters(), fresh.model.parameters()))
    assert job.optimizer.param_groups[0]["lr"] == fresh.optimizer.param_groups[0]["lr"]


def run_checked(jobs: list[wf.Job], **options: Any) -> wf.Report:
    """Runs jobs together, every event of their memory judged."""
    with wf.Engine("8MiB", threads=1, check=True, **options) as engine:
        for job in jobs:
            engine.submit(job)
    assert engine.check_races() == []
    return engine.report()


@pytest.mark.parametrize("every", [None, "epoch", "step"])
@pytest.mark.parametrize("lanes", [1, 2])
def test_the_numbers_are_those_of_the_loop(every: str | None, lanes: int) -> None:
    def make() -> list[wf.Job]:
        return [make_job(name, every, epochs=40) for name in "abc"]

    jobs = make()
    report = run_checked(jobs, lanes=lanes)
    assert report.deviations == 0
    for job, fresh in zip(jobs, make(), strict=True):
        assert_equal(job, report[job.name], fresh)


def test_each_step_is_told_of_in_order_and_by_itself() -> None:
    events: list[Any] = []
    with wf.Engine("8MiB", threads=1) as engine:
        engine.subscribe(events.append)
        engine.submit(make_job(steps=300))
    told = [event for event in events if isinstance(event, (GroupsRan, StepDone))]
    assert [type(event) for event in told] == [GroupsRan, StepDone] * 300
    assert [event.step for event in told[1::2]] == list(range(1, 301))
    report = engine.report()
    assert [event.loss for event in told[1::2]] == report["a"].losses
    assert sorted(set(report.spans.step)) == list(range(1, 301))


def set_gain(job: wf.Job) -> None:
    job.model.gain = 0.5  # type: ignore[assignment]


def set_rate(job: wf.Job) -> None:
    job.optimizer.param_groups[0]["lr"] = 0.01


def set_loss(job: wf.Job) -> None:
    job.loss = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]) * 2


@pytest.mark.parametrize("change", [set_gain, set_rate, set_loss])
def test_what_another_thread_changes_counts_from_one_step_on(
    change: Callable[[wf.Job], None],
) -> None:
    job = make_job(steps=ENDLESS)
    with wf.Engine("8MiB", threads=1) as engine:
        handle = engine.submit(job)
        wait_until(lambda: len(handle.losses) > 100)
        change(job)
        after = len(handle.losses)
        wait_until(lambda: len(handle.losses) > after + 500)
        handle.stop()
        losses = handle.result(timeout=300).losses
    plain = wf.run_eager(make_job(epochs=None, steps=len(losses)), threads=1).losses
    pairs = zip(losses, plain, strict=True)
    equal = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    assert equal > 100
    # The rate is first seen in the loss of the step after the one that it is used in.
    candidates = [equal, equal - 1]

    def changed_at(step: int) -> list[float]:
        fresh = make_job(steps=len(losses))
        fresh.on_step = lambda result: change(fresh) if result.step == step else None
        return wf.run_eager(fresh, threads=1).losses

    assert losses in [changed_at(step) for step in candidates]


def test_a_loss_that_is_no_number_ends_the_job_at_that_step() -> None:
    data = batches(90)
    data[70][0].fill_(float("nan"))
    report = wf.run([make_job(data=data, stop_on_nan=True)], memory="8MiB", threads=1)
    assert report["a"].error_type == "NonFiniteLossError"
    assert (report["a"].steps, len(report["a"].losses)) == (71, 71)


def test_a_step_that_fails_leaves_those_before_it() -> None:
    data = batches(90)
    data[70][1].fill_(9)
    jobs = [make_job("bad", data=data), make_job("good", epochs=30)]
    report = wf.run(jobs, memory="8MiB", threads=1)
    assert (report["bad"].state, report["bad"].steps) == ("failed", 70)
    assert_equal(jobs[1], report["good"], make_job(epochs=30))


def test_who_joins_and_who_stops_does_so_while_others_are_under_way() -> None:
    with wf.Engine("8MiB", threads=1, lanes=1) as engine:
        first = engine.submit(make_job("first", steps=ENDLESS))
        wait_until(lambda: len(first.losses) > 100)
        second = engine.submit(make_job("second", steps=200))
        assert second.result(timeout=300).steps == 200
        first.stop()
        found = first.result(timeout=300)
    assert found.state == "stopped"
    assert found.losses == wf.run_eager(make_job(steps=found.steps), threads=1).losses


def test_shares_follow_the_weights() -> None:
    data = batches(4, size=4096)  # so that lanes are what is short, not the batches
    with wf.Engine("64MiB", threads=1, lanes=1) as engine:
        handles = [
            engine.submit(make_job(name, data=data, steps=ENDLESS, weight=weight))
            for name, weight in (("light", 1.0), ("heavy", 3.0))
        ]
        wait_until(lambda: all(len(handle.losses) > 100 for handle in handles))
        before = [len(handle.losses) for handle in handles]
        wait_until(lambda: len(handles[1].losses) > before[1] + 1500)
        light, heavy = (len(h.losses) - n for h, n in zip(handles, before, strict=True))
        engine.stop_all()
    assert heavy / light == pytest.approx(3.0, rel=0.4)


def test_no_job_is_charged_for_a_full_garbage_collection() -> None:
    data = batches(4, size=4096)
    objects = [[object()] for _ in range(3_000_000)]  # 0.3 s to go through
    with wf.Engine("64MiB", threads=1, lanes=1) as engine:
        jobs = [engine.submit(make_job(name, data=data, steps=ENDLESS)) for name in "ab"]
        wait_until(lambda: all(len(job.losses) > 100 for job in jobs))
        gc.collect()
        before = [len(job.losses) for job in jobs]
        wait_until(lambda: sum(len(job.losses) for job in jobs) > sum(before) + 400)
        made = [len(job.losses) - n for job, n in zip(jobs, before, strict=True)]
        engine.stop_all()
    del objects
    assert min(made) > 50, "the one that was on the lane then has waited for the other since"


def test_callbacks_of_one_job_see_each_of_its_steps_while_another_rides() -> None:
    seen: list[tuple[int, float]] = []
    jobs = [
        make_job("asked", steps=60, on_step=lambda result: seen.append((result.step, result.loss))),
        make_job("rides", steps=600),
    ]
    report = wf.run(jobs, memory="8MiB", threads=1)
    assert [step for step, _ in seen] == list(range(1, 61))
    assert [loss for _, loss in seen] == report["asked"].losses
    assert_equal(jobs[1], report["rides"], make_job(steps=600))


class Drawn(torch.utils.data.Dataset):
    """Samples with noise; remembers who has asked for them. Some take their time."""

    def __init__(self, slow: bool) -> None:
        self.slow, self.threads = slow, set[int]()
        self.inputs, self.labels = torch.randn(30, 8), torch.randint(4, (30,))

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.threads.add(threading.get_ident())
        if self.slow and index % 10 == 0:
            time.sleep(0.008)
        return self.inputs[index] + torch.randn(8), self.labels[index]


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("lanes", [1, 2])
def test_batches_that_come_in_turn_are_fetched_between_steps(
    lanes: int, slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the thread that makes the steps, unless they take so long that others have the lane."""
    if not slow:  # however busy the machine is
        monkeypatch.setattr(job_run, "_SHORT_FETCH_SECONDS", 60.0)
        monkeypatch.setattr(trains, "_PATIENCE_SECONDS", 60.0)
    callers: dict[str, list[int]] = {}

    def make(name: str) -> wf.Job:
        seen = callers.setdefault(name, [])
        torch.manual_seed(1)

        def on_step(step: wf.StepResult) -> None:
            seen.append(threading.get_ident())
            torch.rand(1)  # from the stream that the data draw from, too

        data = torch.utils.data.DataLoader(Drawn(slow), batch_size=4, shuffle=True)
        return make_job(name, data=data, on_step=on_step, capture=True, epochs=20)

    jobs = [make(name) for name in "ab"]
    report = run_checked(jobs, lanes=lanes)
    for job in jobs:
        own = sum(thread in job.data.dataset.threads for thread in callers[job.name])
        assert slow or own > 100, "of 160 steps"
        assert_equal(job, report[job.name], make(job.name))


class Held(nn.Module):
    """Has its data as a buffer, which its steps write to where `writes`."""

    def __init__(self, rows: torch.Tensor, writes: bool, rate: float) -> None:
        super().__init__()
        self.writes = writes
        self.register_buffer("rows", rows)
        dropout = [nn.Dropout(rate)] if rate else []
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), *dropout, nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes and self.training:
            self.get_buffer("rows").mul_(0.999)
        return self.layers(x)


SHUFFLED: dict[str, dict[str, Any]] = {
    "epochs": {"epochs": 12},
    "steps that end amid one": {"steps": 61},
    "evaluated": {"epochs": 8, "evaluate": lambda model: float(model.layers[0].weight.sum())},
    "evaluated by steps": {"steps": 50, "evaluate": lambda model: 1.0, "evaluate_every": 3},
    "drawn in evaluation": {"epochs": 8, "evaluate": lambda model: torch.rand(()).item()},
    "accumulated": {"epochs": 6, "accumulate": 2},
    "subset": {"epochs": 12, "subset": True},
    "a generator": {"epochs": 12, "own": True},
    "data that steps change": {"epochs": 12, "writes": True},
    "data that steps change later": {"epochs": 12, "later": True},
    "data that steps change later, without dropout": {"epochs": 12, "later": True, "rate": 0.0},
    "scheduled": {"epochs": 12, "every": "epoch"},
    "called back": {"epochs": 12, "callback": True},
    "a list": {"epochs": 12, "listed": True},
    "a list that steps change": {"epochs": 12, "listed": True, "writes": True},
    "a list that callbacks change": {"epochs": 12, "listed": True, "callback": True},
}


@pytest.mark.parametrize(("capture", "name"), crossed([True, "auto"], list(SHUFFLED)))
def test_steps_and_data_that_draw_do_so_in_turn(name: str, capture: Any) -> None:
    """Dropout beside a loader that shuffles: with batches fetched ahead or not, and callbacks in
    the caller's thread, too."""

    def make(
        job: str,
        subset: bool = False,
        own: bool = False,
        listed: bool = False,
        writes: bool = False,
        later: bool = False,
        rate: float = 0.3,
        every: str | None = None,
        callback: bool = False,
        **more: Any,
    ) -> wf.Job:
        torch.manual_seed(4)
        rows, labels = torch.randn(53, 8), torch.randint(4, (53,))
        model = Held(rows, writes, rate)
        data: Any = torch.utils.data.TensorDataset(rows, labels)
        if subset:
            data = torch.utils.data.Subset(data, list(range(50, 0, -2)))
        generator = torch.Generator().manual_seed(2) if own else None
        loader: Any = torch.utils.data.DataLoader(data, 4, shuffle=True, generator=generator)
        if listed:  # views of what the model holds
            loader = list(zip(rows.split(4), labels.split(4), strict=True))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        settings: dict[str, Any] = {"seed": 0, "data": loader, **more}
        if every:
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            settings.update(scheduler=scheduler, scheduler_every=every)
        if later:
            evaluations = itertools.count()

            def evaluate(model: Any) -> None:
                model.writes = next(evaluations) > 5

            settings["evaluate"] = evaluate
        if callback:

            def on_step(step: wf.StepResult) -> None:
                torch.manual_seed(step.step)
                if listed:
                    loader[step.step % len(loader)][0].mul_(1.01)

            settings["on_step"] = on_step
        loss = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
        return wf.Job(job, model=model, optimizer=optimizer, loss=loss, **settings)

    settings = SHUFFLED[name]
    if "writes" in settings and "listed" in settings:
        capture = "auto"  # a step that changes its batch is never captured
    for callbacks in ("lane", "caller"):
        jobs = [make(each, capture=capture, **settings) for each in "ab"]
        report = run_checked(jobs, callbacks=callbacks)
        for job in jobs:
            fresh = make(job.name, **settings)
            eager = wf.run_eager(fresh, threads=1)
            assert report[job.name].error is None
            assert report[job.name].losses == eager.losses
            assert report[job.name].evaluations == eager.evaluations
            states = job.model.state_dict(), fresh.model.state_dict()
            assert all(map(torch.equal, *(state.values() for state in states)))


def test_others_go_on_while_a_jobs_first_captured_step_is_checked() -> None:
    seen: list[bool] = []
    with wf.Engine("8MiB", lanes=2, threads=1) as engine:
        other = engine.submit(make_job("other", steps=ENDLESS, capture=True))
        wait_until(lambda: len(other.losses) > 100)

        def look(event: Any) -> None:
            if isinstance(event, EagerStepBegun) and event.job == "a":
                before, until = len(other.losses), time.monotonic() + 10
                while len(other.losses) == before and time.monotonic() < until:
                    time.sleep(0.001)
                seen.append(len(other.losses) > before)

        engine.subscribe(look)
        job = make_job(steps=50, capture=True)
        report = engine.submit(job).result()
        other.stop()
    assert seen
    assert all(seen)
    assert_equal(job, report, make_job(steps=50))


def _scale(job: wf.Job) -> None:
    with torch.no_grad():
        for parameter in job.model.parameters():
            parameter.mul_(0.9)


def _switch_gradients(job: wf.Job) -> None:
    torch.set_grad_enabled(not torch.is_grad_enabled())
    torch.set_grad_enabled(not torch.is_grad_enabled())  # as it was


def _draw(job: wf.Job) -> None:
    torch.rand(3)


def _exchange_parameter(job: wf.Job) -> None:
    job.model.bias.data = job.model.bias.data.clone() + 0.1  # type: ignore[union-attr,operator]


def _freeze(job: wf.Job) -> None:
    bias = job.model.bias
    assert isinstance(bias, nn.Parameter)
    bias.requires_grad_(not bias.requires_grad)


CHANGES: list[Callable[[wf.Job], None]] = [
    lambda job: job.optimizer.param_groups[0].update(lr=0.05),
    lambda job: setattr(job.model, "gain", job.model.gain + 0.5),
    lambda job: torch.set_num_threads(1),
    _scale,
    _switch_gradients,
    _draw,
    _exchange_parameter,
    _freeze,
]


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("shuffles", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_callback_changes_counts_from_the_next_step_on(
    change: Callable[[wf.Job], None], shuffles: bool, lanes: int
) -> None:
    """However long the thread has been in the job's context by then: two of 60 steps change it."""

    def make(name: str) -> wf.Job:
        data: Any = batches(7)
        if shuffles:
            dataset = torch.utils.data.TensorDataset(*map(torch.cat, zip(*data, strict=True)))
            data = torch.utils.data.DataLoader(dataset, batch_size=4, shuffle=True)
        job = make_job(name, data=data, steps=60)

        def on_step(step: wf.StepResult) -> None:
            if step.step in (23, 41):
                change(job)

        job.on_step = on_step
        return job

    jobs = [make("a"), make("b")]
    report = run_checked(jobs, lanes=lanes)
    for job in jobs:
        assert_equal(job, report[job.name], make(job.name))


@pytest.mark.parametrize("surrounded", [False, True])
def test_callbacks_enter_the_jobs_context_once_a_train(
    surrounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where that is another one than the lanes have."""
    entered: list[int] = []
    entering = CallerContext._entered

    def note(self: CallerContext, *given: Any) -> Any:
        entered.append(1)
        return entering(self, *given)

    seen: list[int] = []
    monkeypatch.setattr(CallerContext, "_entered", note)
    job = make_job(epochs=100, on_step=lambda step: seen.append(step.step))
    with torch.device("cpu") if surrounded else contextlib.nullcontext():
        report = run_checked([job])
    assert seen == list(range(1, 701))
    assert len(entered) < len(seen) / 2
    assert_equal(job, report["a"], make_job(epochs=100))


def test_other_threads_of_python_go_on_beside_the_first_train_of_long_steps():
    """No train keeps the interpreter's lock."""
    torch.manual_seed(5)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(2)))
    ticks, seen, over = itertools.count(), [], threading.Event()

    def tick() -> None:
        while not over.wait(0.001):
            next(ticks)

    job = wf.Job(
        "long",
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-6),
        loss=lambda model, batch: model(batch).square().mean(),
        data=[torch.ones(768, 1024)],
        steps=4,
        capture=True,
        on_step=lambda step: seen.append(next(ticks)),
    )
    thread = threading.Thread(target=tick)
    thread.start()
    try:
        wf.run([job, make_job("short", steps=7000, capture=True)], memory="1GiB")
    finally:
        over.set()
        thread.join()
    assert all(later - former > 5 for former, later in itertools.pairwise(seen)), seen


@pytest.mark.parametrize("calls_back", [False, True])
def test_eager_steps_keep_their_share_beside_trains_of_the_shortest_steps(calls_back: bool):
    """Each operator of an eager step lets go of the interpreter's lock, and must get it back soon:
    beside trains that kept it each such step took as long as a thousand captured ones."""
    noted: list[int] = []
    on_step = {"on_step": lambda step: noted.append(step.step)} if calls_back else {}
    with wf.Engine("64MiB", threads=1) as engine:
        endless = [
            engine.submit(make_job(f"endless-{i}", steps=ENDLESS, capture=True, **on_step))
            for i in range(3)
        ]
        wait_until(lambda: all(len(handle.losses) > 1000 for handle in endless), 60)
        before = sum(len(handle.losses) for handle in endless)
        eager = engine.submit(make_job("eager", steps=60, capture=False)).result()
        meanwhile = sum(len(handle.losses) for handle in endless) - before
        engine.stop_all()
    assert eager.steps == 60
    assert meanwhile < 60 * 300
