"""What is said of a job whose steps, or optimizer, run eagerly."""

import warnings

import pytest

import waterflow as wf
from tests.support.steps import job_of
from waterflow.common.errors import CaptureError
from waterflow.steps.opacity import Opacity

pytestmark = pytest.mark.cpu


def test_a_step_is_given_up_with_its_reason():
    opacity = Opacity(job_of())
    with pytest.warns(wf.OpaqueStepWarning, match="job 'a': the step runs as eager Python, bec"):
        opacity.give_up_step("it rolls dice")
    assert opacity.step == "it rolls dice"
    assert opacity.optimizer is None
    assert opacity.notes == ["the step runs as eager Python, because it rolls dice"]


def test_a_job_that_insists_ends_instead():
    opacity = Opacity(job_of(capture=True))
    with pytest.raises(CaptureError, match=r"job 'a' .*data\.py.*it rolls dice"):
        opacity.give_up_step("it rolls dice")
    assert opacity.step is None
    assert opacity.notes == []


def test_an_optimizer_is_given_up_by_its_name():
    opacity = Opacity(job_of())
    with pytest.warns(wf.OpaqueStepWarning, match="the optimizer runs as eager Python"):
        opacity.give_up_optimizer("it counts")
    assert opacity.optimizer == "SGD cannot be captured exactly: it counts"
    assert opacity.step is None


def test_a_note_is_made_once():
    opacity = Opacity(job_of())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opacity.note("something")
        opacity.note("something")
    assert opacity.notes == ["something"]
    assert len(caught) == 1


def test_a_filter_that_makes_errors_of_warnings_ends_nothing():
    opacity = Opacity(job_of())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opacity.note("something")
    assert opacity.notes == ["something"]
