"""What a captured step takes for granted: seen to change, put back, narrowed by observation."""

import sys

import pytest
import torch
from torch import optim

from tests.support.data import cross_entropy
from tests.support.models import Mlp
from tests.support.steps import job_of, observed_step
from waterflow.capture.assumptions import Assumptions, Seen
from waterflow.capture.caller import CallerContext

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]


class Tuned(Mlp):
    def __init__(self):
        super().__init__()
        self.gain, self.unread = 1.0, [1]

    def forward(self, x):
        return self.gain * super().forward(x)


def assumed(job, **options):
    return Assumptions(job, CallerContext(), **options)


def set_gain(job):
    job.model.gain = 2.0


def set_clip(job):
    job.clip_grad_norm = 1.0


def set_loss(job):
    job.loss = lambda model, batch: cross_entropy(model, batch)


def set_training(job):
    job.model.eval()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (set_gain, "model.gain"),
        (set_clip, "the job's clip_grad_norm"),
        (set_loss, "the job's loss"),
        (set_training, "model.training"),
    ],
)
def test_a_change_is_seen_and_named(change, what):
    job = job_of(Tuned)
    assumptions = assumed(job)
    assert assumptions.hold()
    assert assumptions.difference() is None
    change(job)
    assert not assumptions.hold()
    assert assumptions.difference() == what


def test_a_switch_of_torch_is_one():
    assumptions = assumed(job_of(Tuned))
    torch.use_deterministic_algorithms(True)
    try:
        assert not assumptions.hold()
        assert assumptions.difference() == "a process-wide setting of torch"
    finally:
        torch.use_deterministic_algorithms(False)
    assert assumptions.hold()


def test_weights_and_hyperparameters_are_followed_by_the_graph_itself():
    job = job_of(Tuned, optimizer=lambda p: optim.Adam(p, lr=0.1))
    assumptions = assumed(job)
    job.optimizer.param_groups[0]["lr"] = 0.2
    observed_step(job)
    assert assumptions.hold()


def test_state_is_put_back():
    job = job_of(Tuned)
    assumptions = assumed(job)
    set_gain(job)
    job.model.extra = 3
    assumptions.restore()
    assert job.model.gain == 1.0
    assert assumptions.hold()


def test_without_the_optimizer_nothing_of_it_counts():
    job = job_of(Tuned, optimizer=lambda p: optim.SGD(p, lr=0.1))
    with_it, without = assumed(job), assumed(job, with_optimizer=False)
    job.optimizer.register_step_pre_hook(lambda *arguments: None)
    assert not with_it.hold()
    assert without.hold()


def test_after_an_observed_step_only_what_it_reads_counts():
    job = job_of(Tuned)
    assumptions = assumed(job)
    assert assumptions.seen is None
    assert assumptions.narrow(observed_step(job)) is None
    assert "gain" in assumptions.seen.names
    job.model.unread.append(2)
    job.model.more = 1
    assert assumptions.hold()
    set_gain(job)
    assert not assumptions.hold()


def printing(model, batch):
    print(end="")
    return cross_entropy(model, batch)


def test_a_step_with_an_impure_call_cannot_be_replayed():
    problem = assumed(job_of(loss=printing)).narrow(observed_step(job_of(loss=printing)))
    assert problem.startswith("the step calls builtins.print, which prints (")
    assert "test_assumptions.py" in problem


class Hook:
    def find_spec(self, name, path, target=None):
        looked_for.append(name)
        print_of(name)
        return None


looked_for: list[str] = []


def print_of(name):
    print(end="")


def importing(model, batch):
    import colorsys

    return cross_entropy(model, batch) * colorsys.ONE_THIRD


def test_hooks_that_import_have_no_part_in_a_step(monkeypatch):
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Hook(), *sys.meta_path])
    job = job_of(loss=importing)
    assumptions = assumed(job)
    assert assumptions.narrow(observed_step(job)) is None
    assert "colorsys" in looked_for
    looked_for.append("more")
    assert assumptions.hold()


numbers = iter(range(100))


def counting(model, batch):
    return cross_entropy(model, batch) * (1 + next(numbers))


def test_what_a_trace_could_not_put_back_is_a_risk():
    assert "numbers" in assumed(job_of(loss=counting)).risk()
    assert assumed(job_of(Tuned)).risk() is None


def test_code_that_was_seen_elsewhere_is_not_walked_again():
    job = job_of(Tuned)
    seen = Seen.by(observed_step(job))
    assumptions = assumed(job, seen=seen)
    assert assumptions.seen is seen
    assert assumptions.narrow(observed_step(job)) is None
    assert assumptions.seen is seen
