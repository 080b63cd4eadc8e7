"""The engine through its public behaviour: real jobs, real faults, one budget."""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import waterflow as wf
from tests.support.differences import assert_equal_to_eager
from tests.support.waiting import wait_until
from waterflow.steps.step_builder import StepBuilder

pytestmark = pytest.mark.cpu

IMAGES = torch.randn(96, 1, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(10, (96,), generator=torch.Generator().manual_seed(1))


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def cnn(width: int = 4, dropout: float = 0.2) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Flatten(),
        nn.Linear(64 * width, 10),
    )


def make_job(name: str, seed: Any = 0, **options: Any) -> wf.Job:
    torch.manual_seed(seed if isinstance(seed, int) else 0)
    model = options.pop("model", None) or cnn(4 + seed % 3 if isinstance(seed, int) else 4)
    optimizer = options.pop("optimizer", None) or torch.optim.AdamW(model.parameters(), 1e-2)
    loader = DataLoader(TensorDataset(IMAGES, LABELS), 32, shuffle=True)
    defaults: dict[str, Any] = {"epochs": 2} if "steps" not in options else {}
    settings = {"loss": cross_entropy, "data": loader, "seed": seed, **defaults, **options}
    return wf.Job(name, model=model, optimizer=optimizer, **settings)


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory survives the engine: nothing else tells, so write and read it."""
    tensor.detach().add_(0)
    return bool(torch.isfinite(tensor).all())


def run(jobs: list[wf.Job], memory: int | str = "32MiB", **options: Any) -> wf.Report:
    return wf.run(jobs, memory=memory, threads=1, **options)


def needed(make: Callable[[], wf.Job]) -> int:
    with pytest.raises(wf.BudgetError) as caught:
        run([make()], memory="1KiB")
    found = re.search(r"needs (\d+) bytes", str(caught.value))
    assert found is not None
    return int(found[1])


# Results


def test_report_of_a_run() -> None:
    report = run([make_job("a", 1), make_job("b", 2)])
    assert [job.state for job in report] == ["finished", "finished"]
    assert report["a"].steps == 6
    assert report["a"].epochs == 2
    assert len(report["a"].losses) == 6
    assert 0 < report.peak_bytes <= report.extent_bytes <= report.budget_bytes == 32 << 20
    assert report["a"].solo_peak_bytes is not None
    assert report["a"].peak_bytes <= report["a"].solo_peak_bytes
    assert len(report.timeline.seconds) > 10
    assert {span.job for span in report.spans} == {"a", "b"}


@pytest.mark.parametrize("policy", ["temporal", "waterwave", "flow"])
def test_jobs_that_fail_in_the_same_round_end_alone(policy):
    """Each leaves blocks behind in the middle of its step; one may lie where another's would."""
    good = [(IMAGES[:32], LABELS[:32])] * 3
    bad = [*good, (IMAGES[:32], LABELS[:32] + 100)]
    jobs = [make_job(f"bad-{n}", n, data=bad, steps=6) for n in range(3)]
    job = make_job("good", 3, steps=6)
    report = run([*jobs, job], policy=policy)
    for failed in jobs:
        assert report[failed.name].state == "failed"
        assert report[failed.name].steps == 3
    assert_equal_to_eager(job, report["good"], make_job("good", 3, steps=6))


@pytest.mark.parametrize("policy", ["temporal", "waterwave", "waterwave-s", "flow"])
def test_tight_budget_keeps_the_numbers(policy: str) -> None:
    jobs = [make_job(f"j{seed}", seed, epochs=4) for seed in range(3)]
    probe = run([make_job(f"j{seed}", seed) for seed in range(3)])
    side_by_side = probe.side_by_side_bytes
    assert side_by_side is not None
    budget = int(side_by_side * 0.6)
    report = run(jobs, memory=budget, policy=policy)
    assert report.peak_bytes <= budget
    assert report.extent_bytes <= budget
    for seed, job in enumerate(jobs):
        assert_equal_to_eager(job, report[job.name], make_job(job.name, seed, epochs=4))


def test_trained_weights_live_in_ordinary_memory_and_can_go_on() -> None:
    job = make_job("a", steps=3)
    run([job])
    gc.collect()
    state = list(job.optimizer.state.values())
    assert all(is_ordinary(p) for p in job.model.parameters())
    assert all(is_ordinary(v) for entry in state for v in entry.values())
    again = wf.Job(
        "again",
        model=job.model,
        optimizer=job.optimizer,
        loss=cross_entropy,
        data=job.data,
        steps=3,
        seed=9,
    )
    other = make_job("a", steps=3)
    wf.run_eager(other, threads=1)
    report = run([again])
    fresh = wf.Job(
        "again",
        model=other.model,
        optimizer=other.optimizer,
        loss=cross_entropy,
        data=other.data,
        steps=3,
        seed=9,
    )
    assert_equal_to_eager(again, report["again"], fresh)


def test_parameters_shared_with_numpy_stay_shared() -> None:
    array = np.ones((2, 4), dtype=np.float32)
    model = nn.Linear(4, 2)
    model.weight = nn.Parameter(torch.from_numpy(array))
    data = [(torch.randn(8, 4), torch.randint(2, (8,)))]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run([make_job("a", model=model, optimizer=optimizer, data=data)])
    assert not np.array_equal(array, np.ones((2, 4)))
    assert np.array_equal(array, model.weight.detach().numpy())


def test_seed_none_is_drawn_when_the_job_is_submitted() -> None:
    torch.manual_seed(5)
    expected = int(torch.empty((), dtype=torch.int64).random_().item())
    job = make_job("a", seed=3)
    job.seed = None
    torch.manual_seed(5)
    report = run([job])
    assert report["a"].seed == expected


# Budget


def test_budget_exactly_enough_and_one_byte_too_small() -> None:
    make = lambda: make_job("a", 1)  # noqa: E731
    need = needed(make)
    assert run([make()], memory=need)["a"].state == "finished"
    job = make()
    before = {name: value.clone() for name, value in job.model.state_dict().items()}
    with pytest.raises(wf.BudgetError, match=rf"'a' needs {need} bytes"):
        run([job], memory=need - 1)
    assert all(torch.equal(before[n], v) for n, v in job.model.state_dict().items())


def test_solo_peak_is_the_measured_peak() -> None:
    report = run([make_job("a", 1)])
    assert report.peak_bytes == report["a"].solo_peak_bytes


def test_a_jobs_peak_is_known_as_soon_as_it_has_ended() -> None:
    with wf.Engine("32MiB") as engine:
        ended = engine.submit(make_job("a", 1)).result()
        peak = ended.peak_bytes
        assert peak == engine.report()["a"].peak_bytes > 0


def test_jobs_that_do_not_fit_together_wait_for_one_another() -> None:
    need = needed(lambda: make_job("a", 0))
    jobs = [make_job("a", 0), make_job("b", 0), make_job("c", 0)]
    report = run(jobs, memory=need)
    assert [job.state for job in report] == ["finished"] * 3
    assert_equal_to_eager(jobs[2], report["c"], make_job("c", 0))


def test_fifty_jobs_at_once() -> None:
    def small(seed: int) -> wf.Job:
        torch.manual_seed(seed)
        model = nn.Linear(4, 2)
        data = [(torch.randn(8, 4), torch.randint(2, (8,)))]
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        return make_job(f"j{seed}", seed, model=model, optimizer=optimizer, data=data, steps=4)

    jobs = [small(seed) for seed in range(50)]
    report = run(jobs, memory="1MiB")
    assert {job.state for job in report} == {"finished"}
    for seed in (0, 17, 49):
        assert_equal_to_eager(jobs[seed], report[f"j{seed}"], small(seed))


# Failures: each ends its job alone, the others' numbers are those of a run without it


def failing_data() -> Iterator[Any]:
    yield IMAGES[:32], LABELS[:32]
    raise OSError("the disk is gone")


class Loop(list[Any]):
    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return self._make()


def raise_at_second(result: wf.StepResult) -> None:
    if result.step == 2:
        raise KeyError("callback")


def bad_labels() -> Iterator[Any]:
    yield IMAGES[:32], LABELS[:32]
    yield IMAGES[:32], LABELS[:32] + 100


def greedy(model: nn.Module, batch: Any) -> torch.Tensor:
    torch.empty(1 << 30, dtype=torch.uint8)
    return cross_entropy(model, batch)


def diverging(model: nn.Module, batch: Any) -> torch.Tensor:
    return cross_entropy(model, batch) * float("inf")


FAULTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "data": ({"data": Loop(failing_data)}, "failed", "the disk is gone"),
    "kernel": ({"data": Loop(bad_labels)}, "failed", "out of bounds"),
    "callback": ({"on_step": raise_at_second}, "failed", "callback"),
    "capture": (
        {
            "loss": lambda m, b: cross_entropy(m, b) * (2 if b[0].sum() > 0 else 1),
            "capture": True,
        },
        "failed",
        "cannot be captured",
    ),
    "nan": ({"loss": diverging, "stop_on_nan": True}, "failed", "is inf"),
    "memory": ({"loss": greedy, "capture": False}, "out_of_memory", "asked for 1073741824 bytes"),
    "empty": ({"data": []}, "failed", "no batch"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_its_job_alone(fault: str) -> None:
    options, state, message = FAULTS[fault]
    jobs = [make_job("good", 1, epochs=3), make_job("bad", 2, **options), make_job("fine", 3)]
    report = run(jobs)
    assert report["bad"].state == state
    assert message in str(report["bad"].error)
    assert report["bad"].exception is not None
    assert_equal_to_eager(jobs[0], report["good"], make_job("good", 1, epochs=3))
    assert_equal_to_eager(jobs[2], report["fine"], make_job("fine", 3))


def test_out_of_memory_says_who_holds_what() -> None:
    report = run([make_job("good", 1, steps=30), make_job("bad", 2, loss=greedy, capture=False)])
    assert isinstance(report["bad"].exception, torch.OutOfMemoryError)
    assert "job 'good' holds" in str(report["bad"].error)
    assert "smaller batch" in str(report["bad"].error)


def test_losses_before_a_fault_are_kept() -> None:
    report = run([make_job("bad", 1, on_step=raise_at_second)])
    assert report["bad"].steps == 2
    expected = wf.run_eager(make_job("bad", 1), threads=1)
    assert report["bad"].losses == expected.losses[:2]


def test_jobs_that_train_the_same_tensor_are_refused() -> None:
    first, second = make_job("a", 1, steps=50), make_job("b", 2)
    second = make_job("b", 2, model=first.model, optimizer=first.optimizer)
    report = run([first, second])
    assert report["a"].state == "finished"
    assert isinstance(report["b"].exception, wf.JobError)
    assert "share a tensor" in str(report["b"].error)


def test_jobs_may_read_the_same_frozen_tensor() -> None:
    base = nn.Linear(64, 16).requires_grad_(False)

    def job(name: str, seed: int) -> wf.Job:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Flatten(), base, nn.ReLU(), nn.Linear(16, 10))
        optimizer = torch.optim.SGD(model[3].parameters(), 0.1)
        return make_job(name, seed, model=model, optimizer=optimizer)

    jobs = [job("a", 1), job("b", 2)]
    report = run(jobs)
    for seed, one in enumerate(jobs, start=1):
        assert_equal_to_eager(one, report[one.name], job(one.name, seed))


def loaded(generator: torch.Generator | None, kind: str) -> DataLoader[Any]:
    rows = TensorDataset(IMAGES, LABELS)
    if kind == "sampler":
        return DataLoader(rows, 32, sampler=RandomSampler(rows, generator=generator))
    return DataLoader(rows, 32, shuffle=kind == "shuffled", generator=generator)


@pytest.mark.parametrize("kind", ["sampler", "shuffled"])
def test_jobs_that_draw_their_batches_from_one_generator_are_refused(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    made = [make_job(name, 1, data=loaded(generator, kind), epochs=9) for name in "ab"]
    report = run(made)
    assert report["a"].ok
    assert "'a' and 'b' draw the order of their batches from one" in str(report["b"].error)
    assert run([made[1]])["b"].ok, "alone it may"


@pytest.mark.parametrize("kind", ["sampler", "shuffled", "in order"])
def test_jobs_may_go_through_one_loader(kind: str) -> None:
    """Which draws from the streams of each, or does not draw."""
    loader = loaded(torch.Generator() if kind == "in order" else None, kind)
    jobs = [make_job(name, 1, data=loader, epochs=9) for name in "ab"]
    report = run(jobs)
    for job in jobs:
        assert_equal_to_eager(job, report[job.name], make_job(job.name, 1, data=loader, epochs=9))


# Stopping


def test_stop_from_the_callback() -> None:
    stop_at_four = lambda result: wf.STOP if result.step == 4 else None  # noqa: E731
    report = run([make_job("a", 1, steps=100, on_step=stop_at_four), make_job("b", 2)])
    assert (report["a"].state, report["a"].steps) == ("stopped", 4)
    assert report["b"].state == "finished"


def test_what_a_step_result_tells() -> None:
    seen: list[wf.StepResult] = []
    run([make_job("a", 1, epochs=2, on_step=seen.append)])
    assert [result.step for result in seen] == [1, 2, 3, 4, 5, 6]
    assert [result.epoch for result in seen] == [0, 0, 0, 1, 1, 1]
    assert seen[0].learning_rates == (1e-2,)


def test_ctrl_c_ends_at_the_step_boundary_with_a_report(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import torch, torch.nn.functional as F, waterflow as wf
        model = torch.nn.Linear(8, 2)
        data = [(torch.randn(16, 8), torch.randint(2, (16,)))] * 10
        loss = lambda m, b: F.cross_entropy(m(b[0]), b[1])
        started = lambda r: print("started", flush=True) if r.step == 1 else None
        job = wf.Job("a", model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1),
                     loss=loss, data=data, steps=10**9, on_step=started)
        try:
            wf.run([job], memory="8MiB")
        except KeyboardInterrupt as stopped:
            report = stopped.report
        print("report", report.interrupted, report["a"].state, report["a"].steps > 0, flush=True)
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        cwd=tmp_path,
        text=True,
        env={**os.environ, "WATERFLOW_CACHE": str(tmp_path)},
        # A shell that runs the tests in the background has its children ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline().strip() == "started"
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=250)
        assert output.strip() == "report True stopped True"
        assert process.returncode == 0
    finally:
        process.kill()


# The engine as users hold it


def test_engine_jobs_come_and_go() -> None:
    second_job = make_job("b", 2)  # built apart: a running engine lends torch's generator
    with wf.Engine(memory="32MiB", threads=1) as engine:
        first = engine.submit(make_job("a", 1, steps=10**9))
        wait_until(lambda: len(first.losses) >= 3)
        assert first.status == "running"
        second = engine.submit(second_job)
        assert second.result(timeout=300).state == "finished"
        first.stop()
        assert first.result(timeout=300).state == "stopped"
        with pytest.raises(wf.JobError, match="name is taken"):
            engine.submit(make_job("a", 1))
    assert_equal_to_eager(second_job, second.result(), make_job("b", 2))
    with pytest.raises(wf.JobError, match="closed"):
        engine.submit(make_job("c", 3))


def test_result_times_out() -> None:
    with wf.Engine(memory="32MiB", threads=1) as engine:
        handle = engine.submit(make_job("a", 1, steps=10**9))
        with pytest.raises(TimeoutError, match="'a' has not ended"):
            handle.result(timeout=0.01)
        engine.stop_all()


def test_engine_ends_the_jobs_of_a_block_that_raises() -> None:
    handles = []

    def fail() -> None:
        with wf.Engine(memory="32MiB", threads=1) as engine:
            handles.append(engine.submit(make_job("a", 1, steps=10**9)))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert handles[0].status == "stopped"


def test_engine_takes_a_job_that_does_not_fit_as_failed() -> None:
    with wf.Engine(memory="8KiB", threads=1) as engine:
        report = engine.submit(make_job("a", 1)).result(timeout=300)
    assert isinstance(report.exception, wf.BudgetError)


def test_jobs_joining_and_leaving_at_random_do_not_disturb_each_other() -> None:
    chance = random.Random(7)
    made = {f"j{i}": (i, chance.randrange(2, 14)) for i in range(10)}
    jobs = {name: make_job(name, seed, steps=steps) for name, (seed, steps) in made.items()}
    with wf.Engine(memory="3MiB", threads=1, check=True) as engine:
        handles = []
        for job in jobs.values():
            handles.append(engine.submit(job))
            time.sleep(chance.random() * 0.2)
            if chance.random() < 0.3:
                chance.choice(handles).stop()
        reports = [handle.result(timeout=300) for handle in handles]
        assert engine.check_races() == []
    for report in reports:
        seed, _ = made[report.name]
        expected = wf.run_eager(make_job(report.name, seed, steps=max(report.steps, 1)), threads=1)
        assert report.losses == expected.losses[: report.steps]
        assert report.state in ("finished", "stopped")
    assert any(report.state == "finished" for report in reports)


@pytest.mark.parametrize("policy", ["temporal", "waterwave", "waterwave-s", "flow"])
@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_every_run_is_free_of_races(policy: str, lanes: int) -> None:
    with wf.Engine(memory="2MiB", policy=policy, lanes=lanes, threads=1, check=True) as engine:
        opaque = make_job("eager", 5, capture=False)
        handles = [engine.submit(make_job(f"j{seed}", seed)) for seed in range(4)]
        handles.append(engine.submit(opaque))
        states = [handle.result(timeout=300).state for handle in handles]
        assert engine.check_races() == []
    assert states == ["finished"] * 5


def test_memory_is_empty_when_all_have_left() -> None:
    engine = wf.Engine(memory="8MiB", threads=1)
    engine.submit(make_job("a", 1))
    engine.submit(make_job("b", 2, capture=False))
    engine.submit(make_job("c", 3, loss=greedy, capture=False))
    engine.close()
    assert engine._arena.statistics().live == 0


def test_an_error_that_is_kept_holds_no_memory() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        activations = model(batch[0])
        raise ValueError(f"shape {tuple(activations.shape)}")

    engine = wf.Engine(memory="8MiB", threads=1)
    handle = engine.submit(make_job("a", 1, loss=loss, capture=False))
    engine.close()
    assert "shape (32, 10)" in str(handle.result().exception)
    assert engine._arena.statistics().live == 0


def test_a_slow_loader_does_not_stop_the_others() -> None:
    gate = threading.Event()

    def slow() -> Iterator[Any]:
        yield IMAGES[:32], LABELS[:32]
        gate.wait(300)
        yield IMAGES[:32], LABELS[:32]

    with wf.Engine(memory="32MiB", threads=1) as engine:
        waiting = engine.submit(make_job("slow", 1, data=Loop(slow), epochs=1))
        wait_until(lambda: waiting.losses)
        quick = engine.submit(make_job("quick", 2))
        assert quick.result(timeout=300).state == "finished"
        assert waiting.status == "running"
        gate.set()
        assert waiting.result(timeout=300).steps == 2


def test_a_loader_with_worker_processes_keeps_the_numbers() -> None:
    def job(name: str) -> wf.Job:
        loader = DataLoader(TensorDataset(IMAGES, LABELS), 32, shuffle=True, num_workers=2)
        return make_job(name, 3, data=loader, epochs=2)

    one = job("a")
    report = run([one, make_job("b", 2)])
    assert_equal_to_eager(one, report["a"], job("a"))


# Bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": "lots"}, "lots"),
        ({"memory": 0}, "0"),
        ({"device": "cuda"}, "cuda"),
        ({"policy": "waterfall"}, "waterwave"),
        ({"lanes": 0}, "lanes"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(wf.JobError, match=message):
        wf.run([make_job("a")], **{"memory": "8MiB", **options})


@pytest.mark.parametrize("given", [make_job("a"), None, 3])
def test_run_wants_a_list(given: Any) -> None:
    with pytest.raises(wf.JobError, match=r"run takes a list of jobs, got .*write run\(\[job\]"):
        wf.run(given, memory="8MiB")
    with wf.Engine("8MiB") as engine, pytest.raises(wf.JobError, match="submit takes a"):
        engine.submit([given])  # type: ignore[arg-type]


def test_run_wants_jobs_with_different_names() -> None:
    with pytest.raises(wf.JobError, match="at least one job"):
        run([])
    with pytest.raises(wf.JobError, match="'a': the name is used 2 times"):
        run([make_job("a"), make_job("a")])
    with pytest.raises(wf.JobError, match=r"waterflow\.Job"):
        run(["a"])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs must be a positive whole number, got 0"),
        ({"steps": 1.5}, "steps must be a positive whole number, got 1.5"),
        ({"loss": 3}, "loss must be callable, got 3"),
        ({"data": 3}, "data must be iterable, got int"),
        ({"scheduler_every": "day"}, "'step' or 'epoch', got 'day'"),
        ({"seed": "x"}, "seed must be a whole number or None, got 'x'"),
        ({"clip_grad_norm": -1.0}, "clip_grad_norm must be above 0"),
        ({"optimizer": "sgd"}, "optimizer must be a"),
    ],
)
def test_bad_jobs_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(wf.JobError, match=re.escape(message)) as caught:
        make_job("odd", **options)
    assert "'odd'" in str(caught.value)


def test_optimizer_of_another_model_is_refused() -> None:
    other = torch.optim.SGD(cnn().parameters(), 0.1)
    with pytest.raises(wf.JobError, match="none of its model's parameters"):
        make_job("odd", optimizer=other)


@pytest.mark.parametrize("capture", [True, False, "auto"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"on_step": lambda step: None}, id="callback"),
        pytest.param({"evaluate": lambda model: 1.0}, id="evaluate"),
        pytest.param({"steps": 4}, id="amid an epoch"),
    ],
)
@pytest.mark.parametrize("tiers", ["on", "off"])
def test_an_open_engine_keeps_nothing_of_a_job_that_has_left(
    capture: Any, options: dict[str, Any], tiers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of trials may pass through one engine, each with a model of its own; and nobody
    collects garbage for their sake."""
    monkeypatch.setenv("WATERFLOW_TIERS", tiers)
    builders: list[weakref.ref[Any]] = []
    build = StepBuilder.build

    def noting(self: StepBuilder, flat: Any) -> Any:
        builders.extend(map(weakref.ref, (self, self.spiller)))
        return build(self, flat)

    monkeypatch.setattr(StepBuilder, "build", noting)
    make_job("a")  # torch keeps the frame in which it has made a first optimizer
    with wf.Engine("32MiB", threads=1) as engine:
        gc.collect()
        gc.disable()
        try:
            job = make_job("a", capture=capture, **options)
            kept = [weakref.ref(part) for part in (job.model, job.optimizer, job.data)]
            report = engine.submit(job).result()
            del job
            wait_until(lambda: not any(part() for part in kept + builders), 10)  # its thread ends
            assert bool(builders) == (capture is True or (capture == "auto" and tiers == "off"))
        finally:
            gc.enable()
        assert engine.report()["a"] is report
        with pytest.raises(wf.JobError, match="the name is taken"):
            engine.submit(make_job("a"))


@pytest.mark.parametrize("policy", ["flow", "temporal", "time-slice"])
@pytest.mark.parametrize("priorities", [("normal",) * 4, ("guaranteed", "opportunistic") * 2])
def test_nor_of_several_whatever_they_were_to_each_other(
    policy: str, priorities: tuple[str, ...]
) -> None:
    if policy != "flow" and priorities[0] != "normal":
        pytest.skip("priorities are for policies under which jobs flow")
    make_job("a")  # torch keeps the frame in which it has made a first optimizer
    with wf.Engine("32MiB", threads=1, policy=policy) as engine:
        gc.collect()
        gc.disable()
        try:
            handles, kept = [], []
            for index, priority in enumerate(priorities):
                job = make_job(str(index), index, steps=6 + 3 * index, priority=priority)
                kept.append(weakref.ref(job.model))
                handles.append(engine.submit(job))
                del job
            assert all(handle.result().ok for handle in handles)
            handles.clear()
            wait_until(lambda: not any(model() for model in kept), 10)
        finally:
            gc.enable()


@pytest.mark.parametrize("jobs", [-1, 1.5, True, "many", None])
def test_an_engine_expects_a_number_of_jobs(jobs: Any) -> None:
    with wf.Engine("1MiB") as engine, pytest.raises(wf.JobError, match="whole number of jobs"):
        engine.expect(jobs)
