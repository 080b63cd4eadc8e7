"""Steps that are known to be opaque before anything is traced."""

import pytest
import torch
from torch import optim
from torch.overrides import TorchFunctionMode

from tests.support.steps import job_of
from waterflow.capture.caller import CallerContext
from waterflow.capture.opaque import has_own_zero_grad, why_opaque

pytestmark = pytest.mark.cpu


class Keeping(optim.SGD):
    def zero_grad(self, set_to_none=True):
        pass


def looks(job):
    job.on_step = lambda result: print(job.model.one.weight.grad)


def why(change=lambda job: None, **options):
    job = job_of(**options)
    change(job)
    return why_opaque(job, CallerContext())


def test_a_plain_job_may_be_captured():
    assert why() is None


def test_an_optimizer_that_evaluates_the_loss():
    reason = why(optimizer=lambda p: optim.LBFGS(p))
    assert reason.startswith("LBFGS evaluates the loss by itself")
    assert "in step)" in reason or "in wrapper)" in reason


def test_an_optimizer_that_may_keep_gradients():
    reason = why(optimizer=lambda p: Keeping(p, lr=0.1))
    assert reason.startswith("Keeping has a zero_grad of its own")
    assert "test_opaque.py" in reason
    plain = optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    assert not has_own_zero_grad(plain)
    plain.zero_grad = lambda set_to_none=True: None
    assert has_own_zero_grad(plain)


def test_callbacks_that_are_to_see_gradients_or_may():
    assert "keep_grads=True" in why(keep_grads=True)
    assert "may look at gradients" in why(looks)
    assert why(looks, capture=True) is None  # found by names alone, so not against the user's will


def test_what_surrounds_the_caller():
    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    with Mode():
        assert "function mode Mode" in why()
