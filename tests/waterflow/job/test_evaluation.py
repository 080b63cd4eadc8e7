"""What `evaluate` and `on_step` may answer, when they are asked, and that looking changes nothing."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import waterflow as wf
from tests.support.data import cross_entropy, pairs
from waterflow.job.evaluation import EvaluationTimes, evaluate, read_answer

pytestmark = pytest.mark.cpu


class Unsized:
    """Batches that nobody can count before."""

    def __iter__(self) -> Any:
        yield from pairs()


def make_job(**options: Any) -> wf.Job:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 3))
    settings = {"data": pairs(), "epochs": 2, "seed": 0, **options}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return wf.Job("a", model=model, optimizer=optimizer, loss=cross_entropy, **settings)


@pytest.mark.parametrize(
    ("answer", "values", "stops"),
    [
        (0.5, {"value": 0.5}, False),
        (torch.tensor(2.0), {"value": 2.0}, False),
        (np.float32(0.25), {"value": 0.25}, False),
        ({"x": 1, "y": torch.tensor([3.0])}, {"x": 1.0, "y": 3.0}, False),
        (wf.STOP, None, True),
        ((0.5, wf.STOP), {"value": 0.5}, True),
        (None, None, False),
    ],
)
def test_an_answer_is_numbers_and_whether_to_stop(answer: Any, values: Any, stops: bool) -> None:
    assert read_answer(make_job(), answer) == (values, stops)


@pytest.mark.parametrize("answer", ["0.5", {1: 2.0}, {"x": "y"}, torch.ones(2), [1.0], (0.5, 1.0)])
def test_any_other_answer_is_an_error_that_names_it(answer: Any) -> None:
    with pytest.raises(wf.JobError, match=r"job 'a': evaluate returned .*a dict of numbers"):
        read_answer(make_job(), answer)


def test_the_model_is_in_eval_mode_and_all_is_put_back() -> None:
    seen: list[Any] = []

    def look(model: nn.Module) -> float:
        seen.extend(module.training for module in model.modules())
        seen.append(torch.is_grad_enabled())
        seen.extend(parameter.grad for parameter in model.parameters())
        return 0.0

    job = make_job(evaluate=look)
    job.model[2].eval()  # a frozen norm in a model that trains
    cross_entropy(job.model, pairs()[0]).backward()
    modes = [module.training for module in job.model.modules()]
    grads = [parameter.grad for parameter in job.model.parameters()]
    evaluate(job)
    assert seen == [False] * 6 + [None] * 6
    assert [module.training for module in job.model.modules()] == modes
    assert all(p.grad is grad for p, grad in zip(job.model.parameters(), grads, strict=True))


def test_all_is_put_back_where_it_fails() -> None:
    def fail(model: nn.Module) -> float:
        raise ValueError("no data")

    job = make_job(evaluate=fail)
    with pytest.raises(ValueError, match="no data"):
        evaluate(job)
    assert all(module.training for module in job.model.modules())


def test_when_it_is_due() -> None:
    each = len(pairs())
    by_epochs, by_steps = (
        EvaluationTimes(make_job(evaluate=lambda model: 0.0, evaluate_every=every))
        for every in ("epoch", 3)
    )
    assert [step for step in range(3 * each + 1) if by_epochs.is_due(step)] == [
        each,
        2 * each,
        3 * each,
    ]
    assert [step for step in range(10) if by_steps.is_due(step)] == [3, 6, 9]
    unsized = EvaluationTimes(make_job(data=Unsized(), evaluate=lambda model: 0.0))
    assert unsized.at_found_ends
    assert unsized.ends_epoch(each) is None
    assert not any(EvaluationTimes(make_job()).is_due(step) for step in range(10))


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "step", None])
def test_a_wrong_interval_names_the_job_and_the_value(every: Any) -> None:
    with pytest.raises(wf.JobError, match=r"job 'a': evaluate_every must be 'epoch' or"):
        make_job(evaluate_every=every)


def test_a_wrong_function_names_the_job_and_the_value() -> None:
    with pytest.raises(wf.JobError, match=r"job 'a': evaluate must be callable or None, got 3"):
        make_job(evaluate=3)


@pytest.mark.parametrize("data", [pairs(), Unsized()])
def test_the_plain_loop_evaluates_and_trains_to_the_same_numbers(data: Any) -> None:
    def draw(model: nn.Module) -> dict[str, float]:
        torch.manual_seed(5)
        return {"drawn": torch.rand(()).item() + random.random() + np.random.rand()}

    plain = wf.run_eager(make_job(data=data))
    evaluated = wf.run_eager(make_job(data=data, evaluate=draw))
    assert evaluated.losses == plain.losses
    each = len(pairs())
    assert [found.step for found in evaluated.evaluations] == [each, 2 * each]


def test_the_plain_loop_stops_and_tells_the_callback() -> None:
    heard: list[wf.StepResult] = []
    job = make_job(evaluate=lambda model: (1.5, wf.STOP), on_step=heard.append, evaluate_every=2)
    report = wf.run_eager(job)
    assert (report.state, report.steps) == ("stopped", 2)
    assert [result.evaluation for result in heard] == [None, {"value": 1.5}]
    assert heard[0].model is job.model


@pytest.mark.parametrize("run", [wf.run_eager, lambda job: wf.run([job], "8MiB", threads=1)["a"]])
def test_a_callback_that_returns_something_else_is_an_error(run: Any) -> None:
    job = make_job(on_step=lambda result: False)
    message = r"job 'a': on_step returned False; it is to return None, or wf.STOP"
    if run is wf.run_eager:
        with pytest.raises(wf.JobError, match=message):
            run(job)
    else:
        found = run(job)
        assert found.state == "failed"
        with pytest.raises(wf.JobError, match=message):
            raise found.exception
