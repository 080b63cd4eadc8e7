"""Steps that are known to be opaque before anything is traced."""

import functools

import pytest
import torch
from torch import nn, optim
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import waterflow as wf
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


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, rows):
        return self.last(torch.tanh(self.first(rows)))


def compiled(way, made):
    """A job of which torch.compile makes something, by a backend that counts in `made`."""

    def backend(graph, inputs):
        made.append(graph)
        return graph

    torch._dynamo.reset()
    torch.manual_seed(0)
    model, loss = Twice(), functional.cross_entropy
    if way == "whole":
        model = torch.compile(model, backend=backend)
    elif way == "part":
        model.first = torch.compile(model.first, backend=backend)
    elif way == "in place":
        model.compile(backend=backend)
    else:
        loss = torch.compile(loss, backend=backend)
    data = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(4)]
    optimizer = optim.SGD(model.parameters(), 0.1)
    function = functools.partial(loss_of, loss)
    return wf.Job("a", model=model, optimizer=optimizer, loss=function, data=data, epochs=2)


def loss_of(loss, model, batch):
    return loss(model(batch[0]), batch[1])


@pytest.mark.parametrize("way", ["whole", "part", "in place", "loss"])
@pytest.mark.usefixtures("validates")
def test_what_torch_compile_makes_stays_eager_and_is_made_as_often_as_in_the_loop(way):
    of_loop, of_run = [], []
    expected = wf.run_eager(compiled(way, of_loop), threads=1).losses
    report = wf.run([compiled(way, of_run)], memory="8MiB", threads=1)
    assert report["a"].losses == expected
    assert report["a"].eager_steps == report["a"].steps
    assert "torch.compile has made of it" in report["a"].notes[0]
    assert len(of_run) == len(of_loop) > 0
