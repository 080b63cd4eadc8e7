"""Trains of steps with a scheduler after each: every number, and every attribute, of the loop."""

from __future__ import annotations

import functools
import itertools
import math
import threading
import time
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler as S

import waterflow as wf
from tests.support.waiting import wait_until
from waterflow.allocator_ext import _C
from waterflow.executor.run.lanes import Lanes
from waterflow.steps import foretold

pytestmark = pytest.mark.cpu

ENDLESS = 10**9


class Own(S.StepLR):
    """A user's."""

    def get_lr(self) -> Any:
        return [0.9 * rate for rate in super().get_lr()]


def sgd(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, **{"lr": 0.1, "momentum": 0.9, **options})


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def grouped(parameters: Any) -> torch.optim.Optimizer:
    weight, bias = parameters
    return torch.optim.Adam([{"params": [weight], "lr": 0.02}, {"params": [bias]}], lr=0.01)


Make = Callable[[torch.optim.Optimizer], Any]


def warmed(optimizer: torch.optim.Optimizer) -> Any:
    warm, rest = S.LinearLR(optimizer, total_iters=30), S.CosineAnnealingLR(optimizer, 150)
    return S.SequentialLR(optimizer, [warm, rest], [30])


def nested(optimizer: torch.optim.Optimizer) -> Any:
    return S.ChainedScheduler([S.ConstantLR(optimizer, 0.5, 40), S.ExponentialLR(optimizer, 0.99)])


#: How each is made, and whether it is worked out ahead.
MADE: dict[str, tuple[Make, bool]] = {
    "StepLR": (lambda o: S.StepLR(o, 7, 0.9), True),
    "MultiStepLR": (lambda o: S.MultiStepLR(o, [5, 5, 60], 0.5), True),
    "ConstantLR": (lambda o: S.ConstantLR(o, 0.25, 50), True),
    "LinearLR": (lambda o: S.LinearLR(o, 0.1, 0.8, 70), True),
    "ExponentialLR": (lambda o: S.ExponentialLR(o, 0.99), True),
    "PolynomialLR": (lambda o: S.PolynomialLR(o, 250, 2.0), True),
    "CosineAnnealingLR": (lambda o: S.CosineAnnealingLR(o, 40, 1e-4), True),
    "CosineAnnealingWarmRestarts": (lambda o: S.CosineAnnealingWarmRestarts(o, 9, 2), True),
    "OneCycleLR": (lambda o: S.OneCycleLR(o, 0.2, total_steps=210), True),
    "OneCycleLR, linear": (
        lambda o: S.OneCycleLR(o, 0.2, total_steps=210, anneal_strategy="linear", three_phase=True),
        True,
    ),
    "CyclicLR": (lambda o: S.CyclicLR(o, 0.01, 0.1, 11), True),
    "CyclicLR, triangular2": (lambda o: S.CyclicLR(o, 0.01, 0.1, 8, mode="triangular2"), True),
    "CyclicLR, exp_range": (
        lambda o: S.CyclicLR(o, 0.01, 0.1, 8, mode="exp_range", gamma=0.99),
        True,
    ),
    "CyclicLR, a user's scale": (
        lambda o: S.CyclicLR(o, 0.01, 0.1, 8, scale_fn=lambda x: 1 / (5 ** (x * 1e-4))),
        False,
    ),
    "SequentialLR": (warmed, True),
    "SequentialLR of others": (
        lambda o: S.SequentialLR(o, [S.StepLR(o, 9), S.ExponentialLR(o, 0.9), warmed(o)], [50, 99]),
        True,
    ),
    "ChainedScheduler": (nested, True),
    "several": (lambda o: [S.ExponentialLR(o, 0.99), S.StepLR(o, 30)], True),
    "one that ends at nothing": (lambda o: S.PolynomialLR(o, 100), True),
    "LambdaLR": (lambda o: S.LambdaLR(o, lambda step: 1 / (1 + step)), False),
    "MultiplicativeLR": (lambda o: S.MultiplicativeLR(o, lambda step: 0.99), False),
    "ReduceLROnPlateau": (lambda o: S.ReduceLROnPlateau(o, patience=3), False),
    "a user's": (lambda o: Own(o, 9), False),
    "a chain with a user's": (lambda o: S.ChainedScheduler([Own(o, 9), S.StepLR(o, 7)]), False),
    "one of more steps than it was made for": (
        lambda o: S.OneCycleLR(o, 0.2, total_steps=100),
        True,
    ),
}


def make_job(
    made: Make,
    optimizer: Callable[..., torch.optim.Optimizer] = sgd,
    batches: int = 61,
    **options: Any,
) -> wf.Job:
    torch.manual_seed(5)
    model = nn.Linear(8, 4)
    given = optimizer(model.parameters())
    scheduler = made(given)
    key = "schedulers" if isinstance(scheduler, list) else "scheduler"
    data = [(torch.randn(4, 8), torch.randint(4, (4,))) for _ in range(batches)]
    settings: dict[str, Any] = {"data": data, "seed": 0, "capture": True, **options}
    loss = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    return wf.Job("a", model=model, optimizer=given, loss=loss, **{key: scheduler}, **settings)


def plain(value: Any, optimizer: Any) -> Any:
    """What can be compared of a scheduler, or a value of its: types and bits."""
    if value is optimizer:
        return "the optimizer"
    if isinstance(value, (S.LRScheduler, S.ReduceLROnPlateau)):
        return type(value), plain(vars(value), optimizer)
    if isinstance(value, dict):
        return type(value), {key: plain(each, optimizer) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [plain(each, optimizer) for each in value]
    if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
        return type(value)
    return type(value), repr(value)


def state_of(job: wf.Job) -> Any:
    optimizer = job.optimizer
    groups = [
        {key: plain(value, optimizer) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    scheduler = job.scheduler
    members = getattr(scheduler, "members", (scheduler,))
    is_noted = hasattr(optimizer.step, "_wrapped_by_lr_sched")
    notes = vars(optimizer).get("_opt_called") if is_noted else None
    return groups, [plain(each, optimizer) for each in members], notes


def assert_equal(job: wf.Job, losses: Any, fresh: wf.Job, expected: Any) -> None:
    assert list(map(repr, losses)) == list(map(repr, expected))
    assert state_of(job) == state_of(fresh)
    assert all(map(torch.equal, job.model.parameters(), fresh.model.parameters()))


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many steps each train has made."""
    found: list[int] = []
    run_train = Lanes.run_train

    def counted(*arguments: Any) -> Any:
        result = run_train(*arguments)
        found.append(len(result.losses))
        return result

    monkeypatch.setattr(Lanes, "run_train", counted)
    return found


def run_plainly(job: wf.Job) -> tuple[list[float], type | None]:
    """The loop's losses, and what has ended it."""
    losses: list[float] = []
    told, job.on_step = job.on_step, lambda result: losses.append(result.loss)
    try:
        return wf.run_eager(job, threads=1).losses, None
    except Exception as error:
        return losses, type(error)
    finally:
        job.on_step = told


@pytest.mark.parametrize("optimizer", [sgd, adamw, grouped])
@pytest.mark.parametrize("name", MADE)
def test_numbers_and_attributes_are_those_of_the_loop(
    name: str, optimizer: Callable[..., Any], lengths: list[int]
) -> None:
    made, is_foretold = MADE[name]
    job, fresh = (make_job(made, optimizer, steps=190) for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, error = run_plainly(fresh)
        report = wf.run([job], memory="8MiB", threads=1)["a"]
    assert report.error_type == (error and error.__name__)
    told = len(report.losses) if error is None else len(expected)  # the scheduler has failed
    assert_equal(job, report.losses[:told], fresh, expected)
    assert (max(lengths) > 1) == is_foretold


@pytest.mark.parametrize("counted", [True, False], ids=["of known length", "of unknown length"])
def test_no_more_is_worked_out_than_steps_may_come(
    counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short jobs by the hundred do not pay for what long ones need."""
    worked_out: list[Any] = []
    step = foretold._Copies.step
    monkeypatch.setattr(
        foretold._Copies, "step", lambda copies: worked_out.append(copies) or step(copies)
    )
    job, fresh = (make_job(MADE["StepLR"][0], steps=40 if counted else None) for _ in range(2))
    if not counted:
        job.data = itertools.islice(job.data, 40)  # type: ignore[arg-type]
        fresh.data = itertools.islice(fresh.data, 40)  # type: ignore[arg-type]
    report = wf.run([job], memory="8MiB", threads=1)["a"]
    assert report.steps == 40
    assert 30 <= len(worked_out) <= (40 if counted else 80)
    assert_equal(job, report.losses, fresh, wf.run_eager(fresh, threads=1).losses)


@pytest.mark.parametrize("name", ["OneCycleLR", "SequentialLR", "MultiStepLR"])
def test_a_job_that_is_stopped_amid_a_train_has_the_state_after_its_steps(name: str) -> None:
    made = MADE[name][0]
    job = make_job(made, steps=None, epochs=ENDLESS)
    if name == "OneCycleLR":
        made = lambda o: S.OneCycleLR(o, 0.2, total_steps=10**6)  # noqa: E731
        job = make_job(made, epochs=ENDLESS)
    with wf.Engine("8MiB", threads=1) as engine:
        handle = engine.submit(job)
        wait_until(lambda: len(handle.losses) > 200)
        handle.stop()
        report = handle.result(timeout=300)
    fresh = make_job(made, epochs=None, steps=report.steps)
    assert_equal(job, report.losses, fresh, wf.run_eager(fresh, threads=1).losses)


@pytest.mark.parametrize("stop_on_nan", [False, True])
def test_a_loss_that_is_no_number_comes_before_the_scheduler(stop_on_nan: bool) -> None:
    def make() -> wf.Job:
        job = make_job(MADE["ExponentialLR"][0], stop_on_nan=stop_on_nan, epochs=2)
        job.data[40][0].fill_(math.nan)  # type: ignore[index]
        return job

    job, fresh = make(), make()
    expected, error = run_plainly(fresh)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = wf.run([job], memory="8MiB", threads=1)["a"]
    assert (report.error_type is not None) == (error is not None) == stop_on_nan
    assert report.steps == (41 if stop_on_nan else 122)
    assert state_of(job) == state_of(fresh)
    assert list(map(repr, report.losses))[: len(expected)] == list(map(repr, expected))


def test_a_step_that_fails_is_followed_by_no_scheduler() -> None:
    def make() -> wf.Job:
        job = make_job(MADE["CosineAnnealingLR"][0], epochs=1)
        job.data[50][1].fill_(9)  # type: ignore[index]
        return job

    job, fresh = make(), make()
    expected, error = run_plainly(fresh)
    assert error is IndexError
    with pytest.warns(wf.JobFailedWarning):
        report = wf.run([job], memory="8MiB", threads=1)["a"]
    assert report.error_type == "IndexError"
    assert_equal(job, report.losses, fresh, expected)


@pytest.mark.parametrize("every", ["step", "epoch"])
def test_evaluations_see_the_rates_of_their_step(every: str) -> None:
    def make(told: list[Any]) -> wf.Job:
        job = make_job(MADE["OneCycleLR"][0], epochs=3, scheduler_every=every, evaluate_every=17)
        job.evaluate = lambda model: told.append(state_of(job))  # type: ignore[func-returns-value]
        return job

    seen: list[Any] = []
    expected: list[Any] = []
    job, fresh = make(seen), make(expected)
    losses = wf.run_eager(fresh, threads=1).losses
    report = wf.run([job], memory="8MiB", threads=1)["a"]
    assert seen == expected
    assert_equal(job, report.losses, fresh, losses)


def test_a_checkpoint_holds_the_scheduler_of_its_step(tmp_path: Any) -> None:
    made = MADE["SequentialLR"][0]
    fresh = make_job(made, batches=150)
    losses = wf.run_eager(fresh, threads=1).losses
    cut = make_job(made, batches=150)
    cut.data[97][1].fill_(9)  # type: ignore[index]
    with pytest.warns(wf.JobFailedWarning):
        wf.run(
            [cut],
            memory="8MiB",
            threads=1,
            checkpoint=tmp_path,
            checkpoint_every="95 steps",
        )
    job = make_job(made, batches=150)
    report = wf.run([job], memory="8MiB", threads=1, resume=tmp_path)["a"]
    assert report.resumed_steps == 95
    assert_equal(job, report.losses, fresh, losses)


def test_what_a_loss_reads_of_the_scheduler_counts() -> None:
    """It is no number of the optimizer's alone."""

    def make() -> wf.Job:
        job = make_job(MADE["ExponentialLR"][0], steps=40, capture="auto")

        def loss(model: Any, batch: Any) -> Any:
            factor = job.scheduler.last_epoch + 1  # type: ignore[union-attr]
            return F.cross_entropy(model(batch[0]), batch[1]) * factor

        job.loss = loss
        return job

    job, fresh = make(), make()
    losses = wf.run_eager(fresh, threads=1).losses
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = wf.run([job], memory="8MiB", threads=1)["a"]
    assert_equal(job, report.losses, fresh, losses)


def rate(job: Any) -> None:
    job.optimizer.param_groups[0]["lr"] = 0.01


def gamma(job: Any) -> None:
    job.scheduler.gamma = 0.97


def method(job: Any) -> None:
    job.scheduler.get_lr = lambda: [0.02]


@pytest.mark.parametrize("change", [rate, gamma, method])
def test_what_another_thread_changes_counts_from_one_step_on(
    change: Callable[[Any], None],
) -> None:
    made: Make = lambda o: S.ExponentialLR(o, 0.9999)  # noqa: E731
    job = make_job(made, epochs=ENDLESS)
    with wf.Engine("8MiB", threads=1) as engine:
        handle = engine.submit(job)
        wait_until(lambda: len(handle.losses) > 100)
        change(job)
        after = len(handle.losses)
        wait_until(lambda: len(handle.losses) > after + 200)
        handle.stop()
        losses = handle.result(timeout=300).losses
    usual = wf.run_eager(make_job(made, epochs=None, steps=len(losses)), threads=1).losses
    pairs = zip(losses, usual, strict=True)
    equal = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    assert equal > 100

    def changed_at(step: int, before: bool) -> list[float]:
        fresh = make_job(made, epochs=None, steps=len(losses))
        scheduler, count = fresh.scheduler, itertools.count(1)
        assert scheduler is not None
        own = types.SimpleNamespace(optimizer=fresh.optimizer, scheduler=scheduler)

        def stepped() -> None:
            this = next(count) == step
            if this and before:
                change(own)
            scheduler.step()
            if this and not before:
                change(own)

        fresh.scheduler = types.SimpleNamespace(step=stepped)
        return wf.run_eager(fresh, threads=1).losses

    options = [(step, before) for step in (equal, equal - 1) for before in (False, True)]
    assert any(losses == changed_at(*option) for option in options)


def test_nobody_sees_a_rate_before_its_step() -> None:
    """A thread that looks all the time sees what steps that were made have led to."""
    made: Make = lambda o: S.ExponentialLR(o, 0.999)  # noqa: E731
    job = make_job(made, epochs=None, steps=3000)
    group, scheduler = job.optimizer.param_groups[0], job.scheduler
    rates: dict[int, float] = {}
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set():
            count = scheduler.last_epoch  # type: ignore[union-attr]
            found = group["lr"]
            if count == scheduler.last_epoch:  # type: ignore[union-attr]
                rates[count] = found
            time.sleep(0)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        report = wf.run([job], memory="8MiB", threads=1)["a"]
    finally:
        ended.set()
        thread.join()
    fresh = make_job(made, epochs=None, steps=3000)
    expected = [fresh.optimizer.param_groups[0]["lr"]]
    for _ in range(3000):
        fresh.optimizer._opt_called = True  # type: ignore[attr-defined]
        fresh.scheduler.step()  # type: ignore[union-attr]
        expected.append(fresh.optimizer.param_groups[0]["lr"])
    assert report.error is None
    assert all(rates[count] == expected[count] for count in rates)


# What is given to the extension


def test_annotations_of_torchs_classes_say_nothing(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks a class for some has an empty dictionary made there, as Lightning does."""
    for _ in range(2):
        lengths.clear()
        report = wf.run([make_job(MADE["StepLR"][0], steps=190)], memory="8MiB", threads=1)["a"]
        assert report.error is None
        assert max(lengths) > 1
        monkeypatch.setattr(S.StepLR, "__annotations__", {}, raising=False)


def test_a_schedule_writes_a_row_a_step() -> None:
    places: dict[str, Any] = {"lr": 0.1}
    missing = object()
    rows = [([(0, 0.2), (1, "new")], [(3, 0.2)]), ([(0, 0.3)], [])]
    schedule = _C.Schedule(
        [(places, "lr", places["lr"]), (places, "note", missing)], missing, [places], rows
    )
    assert schedule.holds()
    assert schedule.registers == []
    assert schedule.advance_to(1)
    assert (places, schedule.done, schedule.registers) == (
        {"lr": 0.2, "note": "new"},
        1,
        [(3, 0.2)],
    )
    assert schedule.advance_to(2)
    assert (places["lr"], schedule.registers) == (0.3, [])
    assert not schedule.advance_to(3), "no more is known"
    assert schedule.done == 2


@pytest.mark.parametrize("write", [{"lr": 0.5}, {"more": 1}])
def test_a_schedule_stops_where_somebody_else_has_written(write: dict[str, Any]) -> None:
    places: dict[str, Any] = {"lr": 0.1}
    schedule = _C.Schedule([(places, "lr", places["lr"])], None, [places], [([(0, 0.2)], [])])
    places.update(write)
    assert not schedule.holds()
    assert not schedule.advance_to(1)
    assert (schedule.done, places["lr"]) == (0, write.get("lr", 0.1))
