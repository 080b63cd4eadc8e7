"""Trials: which steps have to be tried before a trace, and what makes them pass."""

import pytest

import waterflow as wf
from tests.support.data import cross_entropy
from tests.support.steps import Assumed, first_batch, job_of, observed_step
from waterflow.capture.caller import CallerContext
from waterflow.job.batch import flatten
from waterflow.steps.opacity import Opacity
from waterflow.steps.prepared import PreparedBatch
from waterflow.steps.trials import TrialNeeded, Trials

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]

counts = []


def counting_loss(model, batch):
    counts.append(len(counts))
    return cross_entropy(model, batch)


def trials_of(job, **options):
    return Trials(job, CallerContext(), Opacity(job), **options)


def tried(trials, job, times):
    """Makes trials of the job's first batch; returns the batch's signature."""
    batch = first_batch(job)
    flat = flatten(batch)
    for _ in range(times):
        before = trials.begin()
        trials.end(PreparedBatch(batch, flat, trial=True), before, observed_step(job))
    return flat.signature


class Risky(Assumed):
    def __init__(self, what):
        super().__init__()
        self.what = what

    def risk(self):
        return self.what


def test_nothing_is_demanded_before_anything_was_seen():
    trials = trials_of(job_of())
    trials.demand("x")
    trials.demand_for("x", Risky(None))
    with pytest.raises(TrialNeeded):
        trials.demand_for("x", Risky("an iterator"))


def test_the_first_trial_shows_what_to_look_at_and_the_second_passes():
    job = job_of()
    trials = trials_of(job)
    assert trials.begin() is None
    signature = tried(trials, job, 1)
    assert trials.seen is not None
    with pytest.raises(TrialNeeded):
        trials.demand(signature)
    tried(trials, job, 1)
    assert trials.has_passed(signature)
    trials.demand(signature)
    trials.demand_for(signature, Risky("an iterator"))
    with pytest.raises(TrialNeeded):
        trials.demand("another")


def test_a_step_that_has_passed_is_not_tried_again():
    job = job_of()
    trials = trials_of(job)
    assert trials.may_precede("x")
    assert not trials.may_precede(tried(trials, job, 2))
    assert not trials_of(job, may_try=False).may_precede("x")


def test_a_step_that_keeps_moving_what_it_reads_is_given_up():
    job = job_of(loss=counting_loss)
    trials = trials_of(job)
    with pytest.warns(wf.OpaqueStepWarning, match="the step changes .*'counts'"):
        signature = tried(trials, job, 3)
    assert not trials.has_passed(signature)


def test_a_move_is_forgiven_once():
    trials = trials_of(job_of())
    assert trials.count_move("a cache") is None
    assert "the step changes a cache (" in trials.count_move("a cache")
    assert trials.count_move("global 'x' of f (a.py:3)") == (
        "the step changes global 'x' of f (a.py:3)"
    )


def test_checks_tell_later_trials_what_to_look_at():
    job = job_of()
    trials, assumptions = trials_of(job), Assumed()
    assumptions.seen = object()
    trials.note_seen(assumptions)
    assert trials.seen is None  # no trial has asked
    tried(trials, job, 1)
    trials.note_seen(assumptions)
    assert trials.seen is assumptions.seen
