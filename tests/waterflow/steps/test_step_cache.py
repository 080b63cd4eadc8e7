"""Which step serves a batch, and when a capture is kept, made anew or given up."""

import pytest
import torch
from torch import optim

import waterflow as wf
from tests.support.data import cross_entropy, rows
from tests.support.jobs import adam
from tests.support.models import Mlp
from tests.support.steps import first_batch, job_of, observed_step, steps_of
from waterflow.account.purity import observer
from waterflow.job.batch import flatten
from waterflow.job.training_step import eager_step
from waterflow.steps import step_cache
from waterflow.steps.prepared import CheckedStep
from waterflow.steps.step_cache import ManyShapesError

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]


def captured(job):
    """The job's steps, its batch taken apart, and what serves it."""
    steps, flat = steps_of(job), flatten(first_batch(job))
    return steps, flat, steps.cache.valid_or_captured(flat)


def test_a_capture_is_kept_while_it_holds():
    job = job_of()
    steps, flat, found = captured(job)
    assert steps.cache.valid_or_captured(flat) is found
    job.model.one.extra = 1  # what nobody reads does not count once a step was observed
    job.model.eval()
    other = steps.cache.valid_or_captured(flat)
    assert other is not found
    assert steps.cache.recaptures.count == 1
    job.model.train()
    assert steps.cache.known(flat.signature) is other
    assert steps.cache.known(flat.signature, preferred=found) is found


def test_the_first_step_serves_until_there_is_state():
    job = job_of(optimizer=adam)
    steps, _, found = captured(job)
    assert steps.cache.step_for(found) is found.first
    eager_step(job, first_batch(job))
    steps.cache.collect_persistent()
    assert steps.cache.step_for(found) is found.steady
    job.optimizer.state.clear()
    steps.cache.collect_persistent()
    assert steps.cache.step_for(found) is found.first


def test_captures_for_other_state_go_with_it():
    job = job_of(optimizer=adam)
    eager_step(job, first_batch(job))
    steps, flat, _ = captured(job)
    job.optimizer.state.clear()
    steps.cache.collect_persistent()
    assert steps.cache.is_empty
    assert steps.cache.valid_or_captured(flat).first is not None
    assert steps.cache.recaptures.count == 1


def test_no_step_serves_hyperparameters_that_have_outgrown_the_graph():
    job = job_of(optimizer=lambda p: optim.SGD(p, lr=0.1, weight_decay=0.0))
    steps, flat, found = captured(job)
    (group,) = job.optimizer.param_groups
    group["lr"] = 0.3
    assert steps.cache.step_for(found) is found.steady
    group["weight_decay"] = 0.5
    assert steps.cache.step_for(found) is None
    steps.cache.renew(found, flat)
    assert steps.cache.step_for(found) is found.steady


def test_what_steps_write_to():
    job = job_of(optimizer=lambda p: optim.SGD(list(p)[:1], lr=0.1))
    steps, _, _ = captured(job)
    assert [id(tensor) for tensor in steps.cache.written()] == [id(job.model.one.weight)]
    with pytest.warns(wf.OpaqueStepWarning):
        steps.opacity.give_up_step("it rolls dice")
    assert len(steps.cache.written()) == 4


def test_too_many_shapes_are_refused_and_those_known_go_on(monkeypatch):
    monkeypatch.setattr(step_cache, "MAX_SHAPES", 1)
    steps, flat, found = captured(job_of())
    with pytest.raises(ManyShapesError, match="1 different shapes"):
        steps.cache.valid_or_captured(flatten(rows(3)))
    assert steps.cache.valid_or_captured(flat) is found


class Reassigning(Mlp):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        return super().forward(x)


def test_a_callback_may_hold_a_buffer_that_is_reassigned():
    with pytest.raises(wf.CaptureError, match="buffer 'mean' a new tensor"):
        captured(job_of(Reassigning, on_step=lambda result: None))
    captured(job_of(Reassigning))


# What a check tells


def test_a_step_that_is_equal_may_be_replayed():
    job = job_of()
    steps, _, found = captured(job)
    seen = observed_step(job)
    steps.cache.judge(found, found.steady, CheckedStep(1.0, None, seen))
    assert found.checked == {found.steady}


def test_a_step_that_nobody_could_check_stays_unchecked():
    steps, _, found = captured(job_of())
    steps.cache.judge(found, found.steady, CheckedStep(1.0, None, observer(), adopted=True))
    assert not found.checked
    assert steps.opacity.step is None


def test_a_difference_gives_the_step_up():
    steps, flat, found = captured(job_of())
    with pytest.warns(wf.OpaqueStepWarning, match="other numbers than the eager one: the loss"):
        steps.cache.judge(found, found.steady, CheckedStep(1.0, "the loss", observer()))
    assert steps.opacity.step is not None
    assert not found.checked
    assert steps.cache.valid(flat.signature) is found  # what is kept is none of opacity's affair


def test_a_step_that_moves_what_it_reads_is_captured_anew_once():
    job = job_of()
    steps, flat, found = captured(job)
    job.model.eval()
    steps.cache.judge(found, found.steady, CheckedStep(1.0, None, observer()))
    assert steps.opacity.step is None
    assert steps.cache.known(flat.signature) is None
    found = steps.cache.valid_or_captured(flat)
    job.model.train()
    with pytest.warns(wf.OpaqueStepWarning, match=r"the step changes model.training"):
        steps.cache.judge(found, found.steady, CheckedStep(1.0, None, observer()))


def printing_loss(model, batch):
    print(end="")
    return cross_entropy(model, batch)


def test_a_step_that_calls_what_is_not_pure_is_given_up():
    steps, _, found = captured(job_of())
    seen = observed_step(job_of(loss=printing_loss))
    with pytest.warns(wf.OpaqueStepWarning, match=r"the step calls builtins\.print, which prints"):
        steps.cache.judge(found, found.steady, CheckedStep(1.0, None, seen))
    assert not found.checked
