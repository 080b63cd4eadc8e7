"""Jobs are evaluated between steps: the plain loop's numbers, in the budget, beside the others."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import waterflow as wf
from tests.support.data import cross_entropy, pairs
from waterflow.engine.surges import Surges

pytestmark = pytest.mark.cpu


class Unsized:
    """Batches that nobody can count before."""

    def __iter__(self) -> Any:
        yield from pairs()


def look(model: nn.Module) -> dict[str, float]:
    """Draws from every stream, as a careless evaluation does."""
    drawn = torch.rand(()).item() + random.random() + np.random.rand()
    return {"drawn": drawn, "out": model(torch.ones(64, 4)).mean().item()}


def make_job(name: str = "a", **options: Any) -> wf.Job:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
    settings = {"data": pairs(), "epochs": 4, "seed": 0, "evaluate": look, **options}
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    return wf.Job(name, model=model, optimizer=optimizer, loss=cross_entropy, **settings)


WAYS: dict[str, dict[str, Any]] = {
    "epochs": {},
    "steps": {"evaluate_every": 3},
    "each": {"evaluate_every": 1, "steps": 7},
    "unsized": {"data": Unsized()},
    "unsized, ended by steps": {"data": Unsized(), "epochs": None, "steps": 2 * len(pairs())},
    "heard": {"evaluate_every": 2, "on_step": lambda result: None},
    "opaque": {"evaluate_every": 2, "capture": False},
}


@pytest.mark.parametrize("policy", ["flow", "waterwave", "temporal"])
@pytest.mark.parametrize("callbacks", ["lane", "caller"])
def test_numbers_are_those_of_the_plain_loop(policy: str, callbacks: str) -> None:
    jobs = [make_job(name, **options) for name, options in WAYS.items()]
    random.seed(0)
    np.random.seed(0)
    report = wf.run(jobs, "8MiB", policy=policy, threads=1, callbacks=callbacks)
    for name, options in WAYS.items():
        random.seed(0)
        np.random.seed(0)
        alone = make_job(name, **options)
        plain = wf.run_eager(alone, threads=1)
        assert report[name].losses == plain.losses, name
        assert report[name].evaluations == plain.evaluations != [], name
        weights = zip(
            next(job for job in jobs if job.name == name).model.parameters(),
            alone.model.parameters(),
            strict=True,
        )
        assert all(one.equal(other) for one, other in weights)


def test_an_evaluation_changes_no_number_of_the_training() -> None:
    report = wf.run([make_job("with"), make_job("without", evaluate=None)], "8MiB", threads=1)
    assert report["with"].losses == report["without"].losses


def test_the_callback_hears_of_it_after_it() -> None:
    heard: list[wf.StepResult] = []
    job = make_job(on_step=heard.append, epochs=2)
    report = wf.run([job], "8MiB", threads=1)["a"]
    each = len(pairs())
    assert [result.step for result in heard] == list(range(1, 2 * each + 1))
    assert [result.epoch_ended for result in heard] == ([False] * (each - 1) + [True]) * 2
    found = [(result.step, result.evaluation) for result in heard if result.epoch_ended]
    assert found == [(made.step, made.values) for made in report.evaluations]
    assert all(result.evaluation is None for result in heard if not result.epoch_ended)
    assert heard[0].model is job.model


@pytest.mark.parametrize("heard", [None, lambda result: None])
def test_it_may_stop_its_job(heard: Any) -> None:
    answers = iter([0.5, (0.25, wf.STOP)])
    job = make_job(evaluate=lambda model: next(answers), evaluate_every=3, on_step=heard)
    report = wf.run([job, make_job("b")], "8MiB", threads=1)
    assert (report["a"].state, report["a"].steps) == ("stopped", 6)
    assert [made.values for made in report["a"].evaluations] == [{"value": 0.5}, {"value": 0.25}]
    assert report["b"].state == "finished"


def test_one_that_fails_fails_its_job_alone() -> None:
    def fail(model: nn.Module) -> float:
        raise ValueError("no such file")

    report = wf.run([make_job(evaluate=fail), make_job("b")], "8MiB", threads=1)
    assert (report["a"].state, report["a"].error) == ("failed", "no such file")
    assert (report["b"].state, report["a"].steps) == ("finished", len(pairs()))


@pytest.mark.parametrize("policy", ["flow", "temporal"])
@pytest.mark.parametrize("size", ["fits", "does not"])
def test_its_memory_is_part_of_the_budget(policy: str, size: str) -> None:
    rows = (1 if size == "fits" else 8) * (1 << 20) // 16

    def hold(model: nn.Module) -> float:
        return float(torch.zeros(rows, 4).sum())

    job = make_job(evaluate=hold)
    report = wf.run([job, make_job("b")], "2MiB", policy=policy, threads=1)
    assert report.peak_bytes <= report.budget_bytes
    assert report["b"].state == "finished"
    if size == "fits":
        assert report["a"].state == "finished"
        assert report["a"].solo_peak_bytes > 1 << 20
        assert report.peak_bytes > 1 << 20
    else:
        assert report["a"].state == "out_of_memory"


def test_evaluations_survive_a_run_that_is_resumed(tmp_path: Path) -> None:
    def stop(result: wf.StepResult) -> None:
        if result.step == 10:
            raise ValueError("the process dies")

    options = {"checkpoint": tmp_path, "resume": tmp_path, "threads": 1}
    wf.run([make_job(epochs=8, on_step=stop)], "8MiB", checkpoint_every="4 steps", **options)
    going_on, alone = (make_job(epochs=8, on_step=lambda result: None) for _ in range(2))
    report = wf.run([going_on], "8MiB", **options)["a"]
    assert report.resumed_steps == 8
    plain = wf.run_eager(alone, threads=1)
    assert [made.step for made in report.evaluations] == [made.step for made in plain.evaluations]
    assert report.losses == plain.losses
    outs = [[m.values["out"] for m in r.evaluations] for r in (report, plain)]
    assert outs[0] == outs[1]


def test_evaluations_are_in_a_saved_report(tmp_path: Path) -> None:
    report = wf.run([make_job(evaluate=lambda model: {"x": float("nan")})], "8MiB", threads=1)
    report.save(tmp_path / "report")
    read = wf.Report.load(tmp_path / "report")["a"].evaluations
    assert [made.step for made in read] == [made.step for made in report["a"].evaluations]
    assert all(np.isnan(made.values["x"]) for made in read)


@pytest.mark.parametrize("policy", ["flow", "temporal"])
@pytest.mark.parametrize("capture", ["auto", False])
@pytest.mark.parametrize("steps", [1, 4])
def test_a_callback_behind_an_evaluation_sees_the_gradients(
    policy: str, capture: str | bool, steps: int
) -> None:
    def seen_by(train: Any) -> list[list[Any]]:
        seen: list[list[Any]] = []
        job = make_job(evaluate_every=steps, capture=capture)

        def on_step(result: wf.StepResult) -> None:
            grads = [parameter.grad for parameter in job.model.parameters()]
            seen.append([None if grad is None else grad.tolist() for grad in grads])

        job.on_step = on_step
        train(job)
        return seen

    seen = seen_by(lambda job: wf.run([job], "8MiB", policy=policy, threads=1).raise_errors())
    assert seen == seen_by(lambda job: wf.run_eager(job, threads=1))


def test_room_for_the_first_evaluation_is_known_from_jobs_alike(monkeypatch: Any) -> None:
    """To make room ends what other jobs are in the middle of: once for all trials of a kind."""
    grown: list[str] = []
    grow = Surges.grow

    def noting(self: Surges, job: Any, *arguments: Any) -> bool:
        grown.append(job.name)
        return grow(self, job, *arguments)

    monkeypatch.setattr(Surges, "grow", noting)
    with wf.Engine("8MiB", threads=1) as engine:
        for name in ("a", "b"):
            found = engine.submit(make_job(name, capture=True)).result()
            assert found.evaluations == wf.run_eager(make_job(name), threads=1).evaluations
    assert "a" in grown
    assert "b" not in grown
