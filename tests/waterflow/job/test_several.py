"""Several optimizers, schedulers and modules of one job; steps of one's own."""

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler

import waterflow as wf
from waterflow.common.errors import JobError
from waterflow.job.optimizer_state import StateEntries, trained_parameters
from waterflow.job.several import OptimizerSet, SchedulerSet, follows_metric
from waterflow.study.footprint import footprint_of

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]


def sgd(module, **options):
    return optim.SGD(module.parameters(), lr=0.1, **options)


def make(**options):
    """A job with a step of its own, unless told otherwise."""
    model = options.pop("model", None) or nn.Linear(2, 1)
    given = {"step": lambda batch: 0.0, "data": [torch.zeros(1, 2)], **options}
    if "optimizer" not in given and "optimizers" not in given:
        given["optimizer"] = sgd(model if isinstance(model, nn.Module) else nn.ModuleDict(model))
    return wf.Job("a", model=model, **given)


def test_modules_become_one_with_their_names():
    one, two, loss = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)
    job = make(model={"one": one, "two": two}, modules=[loss])
    assert job.model["two"] is two
    names = [name for name, _ in job.root.named_parameters()]
    assert names == [
        *("model.one.weight", "model.one.bias", "model.two.weight", "model.two.bias"),
        *("beside.0.weight", "beside.0.bias"),
    ]
    assert make().root is not None
    assert (plain := make()).root is plain.model


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"loss": lambda model, batch: 0.0}, "give loss or step, not both"),
        ({"step": 3}, "step must be callable, got 3"),
        ({"accumulate": 2}, "accumulate are for jobs with loss="),
        ({"optimizers": []}, r"optimizers must be a list of optimizers, got \[\]"),
        ({"optimizers": [3]}, r"optimizers must be a list of optimizers, got \[3\]"),
        ({"schedulers": [3]}, r"schedulers must be a list of schedulers, got \[3\]"),
        ({"model": {"one": 3}}, "must be modules, or lists or dicts"),
        ({"modules": [3]}, "must be modules, or lists or dicts"),
        ({"scheduler_metric": 3}, "scheduler_metric must be a text, got 3"),
        ({"data": None}, "data must be iterable"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_what_does_not_go_together_is_refused(options, problem):
    options.setdefault("optimizer", None if "optimizers" in options else sgd(nn.Linear(1, 1)))
    with pytest.raises(JobError, match=f"job 'a': .*{problem}"):
        make(**options)


def test_one_or_several_but_not_both():
    model = nn.Linear(1, 1)
    with pytest.raises(JobError, match="give optimizer or optimizers, not both"):
        make(model=model, optimizer=sgd(model), optimizers=[sgd(model)])
    with pytest.raises(JobError, match="several optimizers are stepped by a step of one's own"):
        make(model=model, step=None, loss=max, optimizers=[sgd(model), sgd(model)])
    own = sgd(model)
    assert make(model=model, optimizers=[own]).optimizer is own


@pytest.mark.parametrize(
    "returned", [None, "low", torch.zeros(2), (0.0, {"a": torch.zeros(2)})], ids=str
)
def test_a_step_that_returns_no_loss_fails_with_that(returned):
    report = wf.run([make(step=lambda batch: returned)], memory="8MiB")["a"]
    assert report.state == "failed"
    assert "must be" in report.error or "must return its loss" in report.error


def test_optimizers_together():
    one, two = nn.Linear(1, 1), nn.Linear(1, 1)
    both = OptimizerSet([sgd(one, momentum=0.9), optim.Adam(two.parameters())])
    assert trained_parameters(both) == [*one.parameters(), *two.parameters()]
    entries = StateEntries(both)
    assert entries.holds(both)
    for parameter in two.parameters():
        parameter.grad = torch.ones_like(parameter)
    both.members[1].step()
    assert not entries.holds(both)
    assert set(both.state) == set(two.parameters())


def test_state_of_one_parameter_in_two_optimizers_is_all_there():
    module = nn.Linear(1, 1)
    both = OptimizerSet([optim.Adam(module.parameters()), optim.Adam(module.parameters())])
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    for member in both.members:
        member.step()
    assert len(both.state[module.weight]) == 6


def test_schedulers_together():
    own = sgd(nn.Linear(1, 1))
    halves = lr_scheduler.StepLR(own, 1, 0.5)
    both = SchedulerSet([halves, lr_scheduler.ReduceLROnPlateau(own)])
    assert follows_metric(both)
    assert not follows_metric(halves)
    state = both.state_dict()
    halves.step()
    both.load_state_dict(state)
    assert halves.last_epoch == 0


def test_a_metric_that_no_step_tells_ends_the_job_by_name():
    model = nn.Linear(2, 1)
    own = sgd(model)
    plateau = lr_scheduler.ReduceLROnPlateau(own)
    job = make(model=model, optimizer=own, scheduler=plateau, scheduler_metric="accuracy")
    report = wf.run([job], memory="8MiB")["a"]
    assert report.state == "failed"
    assert "scheduler_metric='accuracy' is no metric of its last step" in report.error


def test_what_a_step_of_ones_own_that_has_no_graph_needs_is_not_known():
    with pytest.raises(wf.WaterflowError, match=r"test_several\.py.*the step returns 0\.0"):
        footprint_of(make())


def test_the_report_says_why_a_step_of_ones_own_is_opaque(monkeypatch):
    monkeypatch.setenv("WATERFLOW_TIERS", "off")
    with pytest.warns(wf.OpaqueStepWarning, match=r"the step returns 0.0.*test_several\.py"):
        report = wf.run([make(data=[torch.zeros(1, 2)] * 4)], memory="8MiB")["a"]
    assert report.captured == "opaque step"
    assert "test_several.py" in report.notes[0]


def test_who_insists_on_a_graph_of_a_step_that_has_none_is_told_why():
    report = wf.run([make(data=[torch.zeros(1, 2)] * 4, capture=True)], memory="8MiB")["a"]
    assert (report.state, report.error_type) == ("failed", "CaptureError")
    assert "the step returns 0.0" in report.error


def test_what_a_step_leaves_is_counted_against_the_budget():
    model = nn.Linear(256, 256)
    own, kept = sgd(model), []

    def step(batch):
        kept.append(model.weight * 1.0)  # 256 KiB each, and never given up
        return 0.0

    report = wf.run([make(model=model, optimizer=own, step=step, steps=99)], memory="4MiB")["a"]
    assert report.state == "out_of_memory"
    assert 8 <= len(kept) <= 16
    assert all(tensor.isfinite().all() for tensor in kept)
