"""Spot checks: when they are made, and what becomes of a job whose graph is wrong."""

from __future__ import annotations

import functools
import subprocess
import sys

import pytest
import torch
from torch import nn, optim

import waterflow as wf
from tests.support.data import cross_entropy, rows
from tests.support.differences import MEMORY, assert_same_numbers
from tests.support.jobs import sgd
from tests.support.models import Cnn, Mlp, Noisy
from waterflow.common.errors import JobError, NumbersDifferError
from waterflow.steps import audit, check_schedule, step_builder
from waterflow.steps.check_schedule import CheckSchedule
from waterflow.steps.step_binder import StepBinder

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.usefixtures("one_thread"),
]

STEPS = 10
POLICIES = ("flow", "temporal")


class Stubborn(optim.SGD):
    """Looks at a number of its gradients, which no graph can follow."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.sum().item() > 0:
                    parameter.grad.mul_(0.5)
        return super().step(closure)


def job_of(name="a", model=Mlp, optimizer=sgd, kind="rows", steps=STEPS, **options):
    """A new job; equal weights every time."""
    torch.manual_seed(11)
    net = model()
    return wf.Job(
        name,
        model=net,
        optimizer=optimizer(net.parameters()),
        loss=cross_entropy,
        data=[rows(8, kind)] * steps,
        seed=5,
        **options,
    )


def run(*jobs, policy="flow", **options):
    return wf.run(list(jobs), memory=MEMORY, policy=policy, threads=1, **options)


def assert_equal_to_loop(job, report, **options):
    """Whether the job has trained as the plain loop does."""
    expected = job_of(job.name, **options)
    assert_same_numbers(expected, wf.run_eager(expected, threads=1), job, report)


# When checks are made


def heavy():
    """A model whose step takes much longer than the Python around it."""
    return nn.Sequential(nn.Linear(4, 512), *(nn.Linear(512, 512) for _ in range(4)))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cheap_check_is_made_at_powers_of_two(monkeypatch, policy):
    steps = []

    def noted(steps_of_job, *arguments, **options):
        steps.append(done[0] + 1)
        return check(steps_of_job, *arguments, **options)

    check, done = audit.check_step, [0]
    # So that a busy machine does not delay them.
    monkeypatch.setattr(check_schedule, "_FIRST_STEPS", 100)
    monkeypatch.setattr(check_schedule, "_SHARE_OF_ALL", 100)
    monkeypatch.setattr("waterflow.engine.eager_steps.check_step", noted)
    plain = functools.partial(optim.SGD, lr=0.01)
    job = job_of(model=heavy, optimizer=plain)
    x, y = rows(8)
    job.data = [(x.repeat(32, 1), y.repeat(32))] * STEPS
    job.on_step = lambda result: done.__setitem__(0, result.step)
    report = run(job, policy=policy).jobs["a"]
    assert steps == [1, 2, 4, 8]
    assert report.checks == 4
    assert report.captured == "captured", report.notes


@pytest.mark.parametrize("policy", POLICIES)
def test_all_steps_are_checked(policy):
    job = job_of(audit="all")
    report = run(job, policy=policy).jobs["a"]
    assert report.checks == report.eager_steps == STEPS
    assert_equal_to_loop(job, report)


def test_a_job_goes_before_the_run():
    report = run(job_of("a"), job_of("b", audit="off"), audit="all")
    assert report.jobs["a"].checks == STEPS
    assert report.jobs["b"].checks == 0


def test_without_checks_a_first_use_is_observed_only():
    job = job_of(audit="off")
    report = run(job).jobs["a"]
    assert report.checks == 0
    assert 1 <= report.eager_steps <= 2
    assert report.captured == "captured", report.notes
    assert_equal_to_loop(job, report)


def test_an_unknown_audit_is_refused():
    with pytest.raises(JobError, match=r"job 'a'.*audit.*log, all, off|job 'a'.*'often'"):
        job_of(audit="often")
    with pytest.raises(JobError, match=r"audit must be one of .*'often'"):
        wf.Engine(MEMORY, audit="often")


@pytest.mark.parametrize(("model", "kind"), [(Cnn, "images"), (Noisy, "rows")])
@pytest.mark.parametrize("optimizer", [sgd, functools.partial(optim.AdamW, lr=0.02)])
def test_checks_leave_no_trace_in_the_numbers(model, kind, optimizer):
    job = job_of(model=model, kind=kind, optimizer=optimizer, audit="all")
    report = run(job).jobs["a"]
    assert report.captured == "captured", report.notes
    assert_equal_to_loop(job, report, model=model, kind=kind, optimizer=optimizer)


@pytest.mark.filterwarnings("ignore::waterflow.OpaqueStepWarning")
def test_the_users_python_runs_as_often_as_in_the_loop():
    class Counting(Mlp):
        def forward(self, x):
            hidden.append(1)
            return super().forward(x)

    hidden = []
    wf.run_eager(job_of(model=Counting), threads=1)
    expected, hidden[:] = len(hidden), []
    report = run(job_of(model=Counting, audit="all"))
    assert report.jobs["a"].ok
    assert len(hidden) == expected


# Graphs that are wrong


def tampered(monkeypatch, name="a"):
    """Graphs of this job have sigmoid where its model has tanh."""
    join = step_builder.join

    def wrong(job, *parts):
        graph = join(job, *parts)
        for node in graph.nodes if job.name == name else ():
            if node.target is torch.ops.aten.tanh.default:
                node.target = torch.ops.aten.sigmoid.default
        return graph

    monkeypatch.setattr(step_builder, "join", wrong)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("optimizer", [sgd, functools.partial(optim.AdamW, lr=0.02)])
def test_a_wrong_graph_never_trains(monkeypatch, policy, optimizer):
    tampered(monkeypatch)
    other = functools.partial(optim.RMSprop, lr=0.01)  # shares no capture
    job, beside = job_of(optimizer=optimizer), job_of("b", optimizer=other)
    with pytest.warns(wf.OpaqueStepWarning, match="job 'a'.*other numbers than the eager one"):
        report = run(job, beside, policy=policy)
    assert report.jobs["a"].captured == "opaque step"
    assert "the loss" in report.jobs["a"].notes[0]
    assert report.jobs["a"].eager_steps == STEPS
    assert_equal_to_loop(job, report.jobs["a"], optimizer=optimizer)
    assert report.jobs["b"].captured == "captured", report.jobs["b"].notes
    assert_equal_to_loop(beside, report.jobs["b"], optimizer=other)


def test_a_wrong_graph_ends_a_job_that_insists(monkeypatch):
    tampered(monkeypatch)
    report = run(job_of(capture=True), job_of("b", optimizer=optim.RMSprop))
    assert report.jobs["a"].error_type == "CaptureError"
    assert "other numbers" in report.jobs["a"].error
    assert report.jobs["b"].ok


def astray(monkeypatch, after):
    """From a step on, captured steps of job "a" get twice its learning rate."""
    registers, done = StepBinder.registers, [0]

    def wrong(self, step, *values):
        found = registers(self, step, *values)
        factor = 2 if self.job.name == "a" and done[0] >= after else 1
        return {register: value * factor for register, value in found.items()}

    monkeypatch.setattr(StepBinder, "registers", wrong)
    return lambda result: done.__setitem__(0, result.step)


@pytest.mark.parametrize("policy", POLICIES)
def test_numbers_that_differ_later_end_the_job(monkeypatch, policy):
    noted = astray(monkeypatch, after=5)
    monkeypatch.setattr(CheckSchedule, "is_due", lambda self, step, seconds: step == 4 or step >= 8)
    plain = functools.partial(optim.SGD, lr=0.1)
    job = job_of(steps=12, optimizer=plain, on_step=noted)
    beside = job_of("b", steps=12)
    report = run(job, beside, policy=policy)
    failed = report.jobs["a"]
    assert failed.state == "failed"
    assert isinstance(failed.exception, NumbersDifferError)
    assert failed.steps == 7
    for word in ("job 'a'", "at step 8", "parameter 'one.weight'", "capture=False"):
        assert word in failed.error
    assert report.jobs["b"].captured == "captured", report.jobs["b"].notes
    assert_equal_to_loop(beside, report.jobs["b"], steps=12)


@pytest.mark.filterwarnings("ignore::waterflow.OpaqueStepWarning")
def test_a_wrong_graph_beside_an_optimizer_of_python(monkeypatch):
    tampered(monkeypatch)
    optimizer = functools.partial(Stubborn, lr=0.1)
    job = job_of(optimizer=optimizer)
    report = run(job).jobs["a"]
    assert report.captured == "opaque step"
    assert any("other numbers" in note for note in report.notes)
    assert_equal_to_loop(job, report, optimizer=optimizer)


def test_checks_beside_an_optimizer_of_python():
    optimizer = functools.partial(Stubborn, lr=0.1)
    job = job_of(optimizer=optimizer, audit="all", model=Cnn, kind="images")
    report = run(job).jobs["a"]
    assert report.captured == "opaque optimizer", report.notes
    assert report.checks >= STEPS - 1  # before the first trace a step may have to show its calls
    assert_equal_to_loop(job, report, optimizer=optimizer, model=Cnn, kind="images")


# No memory for the eager step of a check


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("late", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("at", [1, 2, 5])
@pytest.mark.parametrize(
    "optimizer", [sgd, functools.partial(optim.AdamW, lr=0.02), functools.partial(Stubborn, lr=0.1)]
)
def test_without_memory_for_it_the_graphs_numbers_count(monkeypatch, policy, optimizer, at, late):
    eager_step, made = audit.eager_step, []

    def short_of_memory(job, batch, after_backward=lambda: None):
        made.append(1)
        if len(made) != at:
            return eager_step(job, batch, after_backward)
        if late:
            return eager_step(job, batch, out_of_memory)
        raise torch.OutOfMemoryError("none left")

    def out_of_memory():
        raise torch.OutOfMemoryError("none left")

    for function in (short_of_memory, out_of_memory):  # else it would count as the user's code
        function.__code__ = function.__code__.replace(co_filename=audit.__file__)
    monkeypatch.setattr(audit, "eager_step", short_of_memory)
    job = job_of(model=Cnn, kind="images", optimizer=optimizer, audit="all")
    report = run(job, policy=policy).jobs["a"]
    assert report.state == "finished", report.error
    assert len(made) >= at
    assert_equal_to_loop(job, report, model=Cnn, kind="images", optimizer=optimizer)


def test_what_torch_imports_in_its_first_step_is_no_call_of_the_step():
    script = """
import torch, waterflow as wf
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 3))
job = wf.Job(
    "a", model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), capture=True,
    loss=lambda m, b: m(b).square().mean(), data=[torch.randn(4, 1, 8, 8)] * 4,
)
report = wf.run([job], memory="64MiB")
assert report.ok, report.jobs["a"].error
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=250)


def test_data_that_are_fetched_ahead_may_draw_while_a_step_is_checked():
    """Every third batch begins an epoch, whose order is drawn from the job's stream."""
    data = torch.utils.data.TensorDataset(*rows(24))

    def make():
        loader = torch.utils.data.DataLoader(data, 8, shuffle=True)
        torch.manual_seed(11)
        net = Mlp()
        return wf.Job(
            "a", net, sgd(net.parameters()), cross_entropy, loader, steps=60, seed=5, audit="all"
        )

    expected, job = make(), make()
    report = run(job).jobs["a"]
    assert_same_numbers(expected, wf.run_eager(expected, threads=1), job, report)


def test_what_a_checked_step_draws_is_compared_however_data_draw_beside_it():
    one, other = torch.tensor([1]), torch.tensor([2])
    drawing = audit.Prediction(0.0, {}, {}, (one, other))
    assert drawing.draws_as(one, other)
    assert not drawing.draws_as(one, one)
    assert not drawing.draws_as(other, other)
    still = audit.Prediction(0.0, {}, {}, (one, one))
    assert still.draws_as(one, one)
    assert still.draws_as(other, other), "data have drawn before it"
    assert not still.draws_as(other, one)
