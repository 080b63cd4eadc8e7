"""Steps as they are built: which there are, what they draw, when they have to wait for a trial."""

import pytest
import torch
from torch import optim

import waterflow as wf
from tests.support.data import cross_entropy, rows
from tests.support.models import Deciding, Noisy
from tests.support.steps import first_batch, job_of, observed_step, steps_of
from waterflow.job.batch import flatten
from waterflow.steps import step_builder
from waterflow.steps.prepared import PreparedBatch
from waterflow.steps.shared_captures import SharedCaptures
from waterflow.steps.step_builder import StepBuilder
from waterflow.steps.step_profiler import StepProfiler
from waterflow.steps.trials import TrialNeeded

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]


def builder_of(job):
    """A builder, and the parts that it works with."""
    steps = steps_of(job)
    profiler = StepProfiler(steps.device, steps.rng, 1, steps.binder)
    made = StepBuilder(
        job,
        steps.rng,
        steps.caller,
        SharedCaptures(),
        steps.opacity,
        steps.trials,
        steps.persistent,
        profiler,
        steps.spiller,
    )
    return made, steps


def built(job):
    builder, steps = builder_of(job)
    return builder.build(flatten(first_batch(job))), builder, steps


def test_state_that_is_not_there_takes_a_first_step():
    found, _, steps = built(job_of(optimizer=lambda p: optim.Adam(p, lr=0.01)))
    assert found.first.creates_state
    assert not found.steady.creates_state
    assert found.first.memory.profile.num_nodes == len(found.first.compiled.tape)
    # Two moments and a count for each of four parameters, in units of 64 bytes.
    assert steps.persistent.final_bytes > 2 * steps.persistent.bytes


def test_an_optimizer_without_state_needs_none():
    found, builder, _ = built(job_of(optimizer=lambda p: optim.SGD(p, lr=0.1)))
    assert found.first is None
    assert not found.steady.creates_state
    assert not builder.draws


def test_kernels_chosen_by_the_clock_are_refused(monkeypatch):
    monkeypatch.setattr(step_builder, "is_chosen_by_clock", lambda node: True)
    with pytest.raises(wf.CaptureError, match=r"cudnn\.benchmark is on.*Switch it off"):
        built(job_of())


def test_a_step_that_draws_is_noted():
    _, builder, _ = built(job_of(Noisy))
    assert builder.draws


class Looking(optim.SGD):
    def step(self, closure=None):
        if self.param_groups[0]["params"][0].grad.sum().item() > 0:
            self.param_groups[0]["params"][0].grad.mul_(0.5)
        return super().step(closure)


def test_an_optimizer_that_no_graph_can_follow_is_left_out():
    job = job_of(optimizer=lambda p: Looking(p, lr=0.1))
    with pytest.warns(wf.OpaqueStepWarning, match="the optimizer runs as eager Python"):
        found, _, steps = built(job)
    assert steps.opacity.optimizer.startswith("Looking cannot be captured exactly")
    assert found.first is None
    assert found.steady.optimizer is None
    assert set(found.steady.compiled.outputs) == {("gradient", index) for index in range(4)}


def test_a_graph_that_hyperparameters_have_outgrown_is_renewed():
    job = job_of(optimizer=lambda p: optim.SGD(p, lr=0.1, weight_decay=0.0))
    found, builder, _ = built(job)
    before, forward = found.steady, found.forward
    job.optimizer.param_groups[0]["weight_decay"] = 0.5
    builder.renew(found, flatten(first_batch(job)))
    assert found.forward is forward
    assert len(found.steady.compiled.tape) > len(before.compiled.tape)


def risky_loss(model, batch):
    next(numbers)
    return cross_entropy(model, batch)


numbers = iter(range(100))


def test_what_a_trace_could_not_put_back_has_to_be_tried_first():
    job = job_of(loss=risky_loss)
    builder, _ = builder_of(job)
    with pytest.raises(TrialNeeded):
        builder.build(flatten(first_batch(job)))
    assert next(numbers) == 0  # nothing of the user's has run


def test_where_steps_were_tried_those_on_other_batches_are_tried_too():
    job = job_of()
    builder, steps = builder_of(job)
    prepared = PreparedBatch(first_batch(job), flatten(first_batch(job)), trial=True)
    for _ in range(2):
        steps.trials.end(prepared, steps.trials.begin(), observed_step(job))
    steps.cache.collect_persistent()  # the eager steps have made the optimizer's state
    assert builder.build(flatten(first_batch(job))).steady is not None
    with pytest.raises(TrialNeeded):
        builder.build(flatten(rows(3)))


def test_a_step_that_no_graph_can_follow_is_an_error():
    job = job_of(Deciding)
    builder, steps = builder_of(job)
    with pytest.raises(wf.CaptureError, match="needs the value of a tensor"):
        builder.build(flatten(first_batch(job)))
    assert steps.opacity.step is None  # whether it is given up is not the builder's affair
    assert torch.is_grad_enabled()
