"""Whatever a callback makes of its own job's objects, another job beside it trains as it would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import waterflow as wf
from tests.exactness.case import batches, cross_entropy

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.filterwarnings("ignore::waterflow.JobFailedWarning"),
    pytest.mark.filterwarnings("ignore::waterflow.OpaqueStepWarning"),
]
STEPS = 8

Spoil = Callable[[wf.Job], Any]


class Unreadable(nn.Sequential):
    def named_parameters(self, *given: Any, **options: Any) -> Any:
        raise RuntimeError("no parameters")

    def modules(self) -> Any:
        raise RuntimeError("no modules")


class Stateless(torch.optim.SGD):
    @property  # type: ignore[override]
    def state(self) -> Any:
        raise RuntimeError("no state")


class Groupless(torch.optim.SGD):
    @property  # type: ignore[override]
    def param_groups(self) -> Any:
        raise RuntimeError("no groups")


def first(job: wf.Job) -> Any:
    return job.model[0]  # type: ignore[index]


def spoil_state(job: wf.Job) -> None:
    job.optimizer.state[first(job).weight] = "nothing"


def spoil_groups(job: wf.Job) -> None:
    job.optimizer.param_groups = None  # type: ignore[assignment]


def spoil_trained(job: wf.Job) -> None:
    job.optimizer.param_groups[0]["params"].append("nothing")


def spoil_model(job: wf.Job) -> None:
    vars(job.model).clear()


def spoil_parameter(job: wf.Job) -> None:
    first(job)._parameters["weight"] = "nothing"


def spoil_module(job: wf.Job) -> None:
    job.model._modules["more"] = "nothing"  # type: ignore[index, union-attr]


def spoil_buffer(job: wf.Job) -> None:
    job.model._buffers["more"] = object()  # type: ignore[assignment, union-attr]


def take_optimizer(job: wf.Job) -> None:
    job.optimizer = None  # type: ignore[assignment]


def take_model(job: wf.Job) -> None:
    job.model = None


def hide_modules(job: wf.Job) -> None:
    job.model.__class__ = Unreadable


def hide_state(job: wf.Job) -> None:
    job.optimizer.__class__ = Stateless


def hide_groups(job: wf.Job) -> None:
    job.optimizer.__class__ = Groupless


SPOILS = (
    *(spoil_state, spoil_groups, spoil_trained, spoil_model, spoil_parameter, spoil_module),
    *(spoil_buffer, take_optimizer, take_model, hide_modules, hide_state, hide_groups),
)


def made(name: str, **options: Any) -> wf.Job:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = {"loss": cross_entropy, "data": batches(), "seed": 0, "steps": STEPS, **options}
    return wf.Job(name, model=model, optimizer=optimizer, **options)


def spoiled(spoil: Spoil, after: int, **options: Any) -> wf.Job:
    def on_step(result: wf.StepResult) -> None:
        if result.step == after:
            spoil(job)

    job = made("spoiled", on_step=on_step, **options)
    return job


@pytest.mark.parametrize("capture", [True, False], ids=["captured", "eager"])
@pytest.mark.parametrize("policy", ["flow", "temporal"])
@pytest.mark.parametrize("spoil", SPOILS, ids=lambda spoil: spoil.__name__)
def test_the_other_job_is_none_the_worse(spoil: Spoil, policy: str, capture: bool) -> None:
    expected = wf.run_eager(made("other", steps=2 * STEPS), 1).losses
    before = wf.run_eager(made("spoiled"), 1).losses
    jobs = [spoiled(spoil, 4, capture=capture), made("other", steps=2 * STEPS, capture=capture)]
    report = wf.run(jobs, memory="64MiB", policy=policy)
    assert report["other"].state == "finished"
    assert report["other"].losses == expected
    assert report["spoiled"].losses[:4] == before[:4]
    if report["spoiled"].state == "finished":  # the loop looks at fewer things
        assert report["spoiled"].losses == wf.run_eager(spoiled(spoil, 4), 1).losses == before
    else:
        assert report["spoiled"].state == "failed"


@pytest.mark.parametrize("capture", [True, False], ids=["captured", "eager"])
@pytest.mark.parametrize("spoil", SPOILS, ids=lambda spoil: spoil.__name__)
def test_a_job_that_has_made_its_last_step_has_finished(spoil: Spoil, capture: bool) -> None:
    expected = wf.run_eager(made("spoiled"), 1).losses
    jobs = [spoiled(spoil, STEPS, capture=capture), made("other", steps=2 * STEPS)]
    report = wf.run(jobs, memory="64MiB")
    report.raise_errors()
    assert report["spoiled"].losses == expected


def test_weights_stay_readable_when_a_job_that_cannot_be_looked_at_has_left() -> None:
    job = spoiled(spoil_state, 4, capture=False)
    weight = first(job).weight
    wf.run([job, made("other")], memory="64MiB")
    stopped = made("stopped", steps=4)
    wf.run_eager(stopped, 1)
    assert torch.equal(weight, first(stopped).weight)


def test_a_job_goes_by_the_name_that_it_was_submitted_with() -> None:
    expected = wf.run_eager(made("spoiled"), 1).losses

    def rename(job: wf.Job) -> None:
        job.name = "other"

    jobs = [spoiled(rename, 3), made("other", steps=2 * STEPS)]
    report = wf.run(jobs, memory="64MiB")
    report.raise_errors()
    assert report["spoiled"].losses == expected
    assert len(report["other"].losses) == 2 * STEPS


@pytest.mark.parametrize("capture", [True, False], ids=["captured", "eager"])
def test_data_that_were_replaced_are_told_at_the_next_epoch(capture: bool) -> None:
    def replace(job: wf.Job) -> None:
        job.data = batches(20)

    data = batches(3)
    report = wf.run([spoiled(replace, 5, data=data, capture=capture)], memory="64MiB")
    assert report["spoiled"].state == "failed"
    assert "its data were replaced while it trains (by a list)" in str(report["spoiled"].error)
    assert len(report["spoiled"].losses) == 6
    report = wf.run([spoiled(replace, 5, data=data, capture=capture, steps=6)], memory="64MiB")
    report.raise_errors()


def test_an_evaluation_that_was_taken_away_is_told() -> None:
    def take_away(job: wf.Job) -> None:
        job.evaluate = None

    other = made("other")
    job = spoiled(take_away, 3, evaluate=lambda model: 1.0, evaluate_every=5)
    report = wf.run([job, other], memory="64MiB")
    assert report["spoiled"].error_type == "JobError"
    assert "its evaluate was set to None while it trains" in str(report["spoiled"].error)
    assert report["other"].state == "finished"
