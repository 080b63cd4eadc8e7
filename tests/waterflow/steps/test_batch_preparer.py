"""Batches as they are prepared: captured, left to eager Python, or looked at again."""

import numpy as np
import pytest
import torch
from torch import nn

import waterflow as wf
from tests.support.data import cross_entropy, rows
from tests.support.models import Deciding, Mlp
from tests.support.steps import first_batch, job_of, observed_step, steps_of
from waterflow.steps.prepared import CheckedStep

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]


def prepared(job, **options):
    steps = steps_of(job, **options)
    return steps, steps.preparer.prepare(first_batch(job))


def test_a_new_shape_waits_for_the_steps_under_way_a_known_one_does_not():
    steps, waited = steps_of(job_of()), []
    for batch in (rows(8), rows(8), rows(4)):
        steps.preparer.prepare(batch, lambda: waited.append(len(steps.cache.steps())))
    assert waited == [0, 2]


def test_what_the_step_before_has_shown_counts():
    """While the feeder waited, the job has become opaque."""
    steps = steps_of(job_of())

    def waiting():
        steps.opacity.step = "it rolls dice"

    assert steps.preparer.prepare(rows(8), waiting).specialization is None
    assert steps.cache.is_empty


def test_a_job_may_want_no_capture():
    steps, batch = prepared(job_of(capture=False))
    assert batch.specialization is None
    assert steps.opacity.step == "the job has capture=False"
    assert steps.opacity.notes == []


def test_a_job_that_is_refused_says_so_at_once_or_with_its_first_batch():
    with pytest.warns(wf.OpaqueStepWarning, match="keep_grads=True"):
        steps = steps_of(job_of(keep_grads=True))
    assert steps.opacity.step == "callbacks are to see gradients (keep_grads=True)"
    insisting = steps_of(job_of(keep_grads=True, capture=True))
    with pytest.raises(wf.CaptureError, match="keep_grads=True"):
        insisting.preparer.prepare(rows(8))


def test_a_lazy_model_is_made_by_an_eager_step():
    job = job_of(lambda: nn.Sequential(nn.LazyLinear(6), nn.Linear(6, 3)))
    steps, batch = prepared(job)
    assert batch.specialization is None
    assert steps.opacity.step is None
    cross_entropy(job.model, rows(8))
    assert steps.preparer.prepare(rows(8)).specialization is not None


def test_a_batch_that_may_hide_tensors_is_left_to_an_eager_step():
    steps = steps_of(job_of())
    with pytest.warns(wf.OpaqueStepWarning, match="some steps run as eager Python"):
        assert steps.preparer.prepare([object()]).specialization is None
    assert steps.opacity.step is None  # the others are captured
    assert steps.preparer.prepare(rows(8)).specialization is not None
    with pytest.raises(wf.CaptureError, match=r"holds a builtins\.object, which may hide"):
        steps_of(job_of(capture=True)).preparer.prepare([object()])


def by_name(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def weighted(model, batch):
    return by_name(model, {"x": batch["x"], "y": batch["y"]}) * len(batch["path"])


def named(path):
    return {**dict(zip("xy", rows(8), strict=True)), "path": path}


def test_what_the_step_cannot_read_makes_no_new_shape():
    steps = steps_of(job_of(loss=by_name))
    values = ["a", "b", 3, None, np.ones(3), object(), torch.ones(2), ["a", "b"]]
    found = [steps.preparer.prepare(named(value)).specialization for value in values]
    assert found[0] is not None
    assert all(one is found[0] for one in found)
    assert steps.opacity.notes == []


def test_what_it_may_read_does():
    steps = steps_of(job_of(loss=weighted))
    one, two, again = (steps.preparer.prepare(named(p)).specialization for p in ("a", "bb", "a"))
    assert one is again is not None
    assert one is not two is not None


def test_another_loss_that_came_while_the_feeder_waited_reads_by_its_own_code():
    job = job_of(loss=by_name)
    steps = steps_of(job)

    def waiting():
        job.loss = weighted

    first = steps.preparer.prepare(named("a"), waiting).specialization
    assert steps.preparer.prepare(named("a")).specialization is first
    assert steps.preparer.prepare(named("bb")).specialization is not first
    job.loss = by_name
    assert steps.preparer.prepare(named("bb")).specialization is not first


def test_a_step_that_no_graph_can_follow_is_given_up():
    steps, batch = prepared(job_of(Deciding))
    assert batch.specialization is None
    assert steps.opacity.step is not None
    assert steps.opacity.notes == []  # an eager step may show that it is the user's own error
    with pytest.warns(wf.OpaqueStepWarning, match="needs the value of a tensor"):
        steps.opacity.prove()
    with pytest.raises(wf.CaptureError, match="needs the value of a tensor"):
        prepared(job_of(Deciding, capture=True))


def risky_loss(model, batch):
    next(numbers)
    return cross_entropy(model, batch)


numbers = iter(range(100))


def test_a_step_that_has_to_be_tried_is_a_trial():
    _, batch = prepared(job_of(loss=risky_loss))
    assert batch.trial
    assert batch.specialization is None
    assert batch.flat is not None


class Tuned(Mlp):
    gain = 1.0

    def forward(self, x):
        return self.gain * super().forward(x)


def test_a_batch_is_fresh_until_something_that_its_step_reads_has_changed():
    job = job_of(Tuned)
    steps, batch = prepared(job)
    assert steps.cache.is_fresh(batch)
    assert steps.preparer.refresh(batch) is batch
    job.model.gain = 2.0
    assert not steps.cache.is_fresh(batch)
    again = steps.preparer.refresh(batch)
    assert again.specialization is not batch.specialization
    assert again.batch is batch.batch
    assert steps.cache.is_fresh(again)


def test_a_batch_of_a_job_that_has_become_opaque_is_not_fresh():
    steps, batch = prepared(job_of())
    with pytest.warns(wf.OpaqueStepWarning):
        steps.opacity.give_up_step("it rolls dice")
    assert not steps.cache.is_fresh(batch)
    assert steps.preparer.refresh(batch).specialization is None


def test_a_step_draws_apart_once_a_check_has_shown_what_it_does():
    job = job_of()
    steps, batch = prepared(job)
    found = batch.specialization
    assert not steps.preparer.draws_apart
    steps.cache.judge(found, found.steady, CheckedStep(1.0, None, observed_step(job)))
    assert steps.preparer.draws_apart
    # Now a batch that comes ahead is not looked at before its turn, when it is.
    job.model.eval()
    ahead = steps.preparer.prepare(first_batch(job))
    assert ahead.specialization is found
    assert steps.preparer.refresh(ahead).specialization is not found


def test_a_step_that_draws_never_does():
    job = job_of(lambda: nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)))
    steps, batch = prepared(job)
    found = batch.specialization
    steps.cache.judge(found, found.steady, CheckedStep(1.0, None, observed_step(job)))
    assert found.steady in found.checked
    assert not steps.preparer.draws_apart
    assert torch.equal(steps.rng.host.get_state(), steps_of(job).rng.host.get_state())
