"""Gradients are let go of beside threads that read them; and whose they are."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
from torch import nn

from waterflow.job.gradients import held_gradients, is_private

pytestmark = pytest.mark.cpu


@pytest.fixture
def threads_take_turns_often():
    former = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(former)


@pytest.mark.usefixtures("threads_take_turns_often")
def test_a_thread_that_reads_a_gradient_finds_it_whole_or_not_at_all():
    """Without `held_gradients` the process dies within some thousand rounds."""
    parameter = torch.nn.Parameter(torch.zeros(64, 64))
    over, found = threading.Event(), []

    def read():
        while not over.is_set():
            gradient = parameter.grad
            if gradient is not None:
                found.append(gradient.untyped_storage().nbytes())

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(20_000):
        parameter.grad = torch.zeros(64, 64)
        with held_gradients([parameter]):
            parameter.grad = None
        assert parameter.grad is None
    over.set()
    reader.join()
    assert set(found) <= {64 * 64 * 4}


def test_afterwards_nobody_holds_the_gradient():
    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = torch.zeros(4)
    gone = []
    storage = parameter.grad.untyped_storage()
    before = torch._C._storage_Use_Count(storage._cdata)
    with held_gradients([parameter]):
        parameter.grad = None
        gone.append(torch._C._storage_Use_Count(storage._cdata))
    assert gone == [before]
    assert torch._C._storage_Use_Count(storage._cdata) == before - 1


def with_gradient() -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(3, 4))
    nn.functional.linear(torch.ones(2, 4), parameter).sum().backward()
    return parameter


def test_a_gradient_that_nobody_else_has_is_private():
    parameter = with_gradient()
    assert is_private(parameter)
    parameter.grad = parameter.grad.clone()
    assert is_private(parameter)
    nn.functional.linear(torch.ones(2, 4), parameter).sum().backward()
    assert is_private(parameter)


@pytest.mark.parametrize(
    "keep",
    [
        lambda gradient: gradient,
        lambda gradient: [gradient],
        lambda gradient: gradient.view(-1),
        lambda gradient: gradient.detach(),
        lambda gradient: gradient[0],
        lambda gradient: gradient.numpy(),
        lambda gradient: memoryview(gradient.numpy()),
        lambda gradient: torch.utils.dlpack.to_dlpack(gradient),
    ],
)
def test_one_that_somebody_keeps_is_not(keep):
    parameter = with_gradient()
    kept = keep(parameter.grad)
    assert not is_private(parameter)
    del kept
    assert is_private(parameter)


def test_one_that_lies_in_other_memory_is_not():
    flat = torch.zeros(12)
    parameter = nn.Parameter(torch.ones(3, 4))
    parameter.grad = flat.view(3, 4)
    assert not is_private(parameter)


def test_an_alias_that_does_not_count():
    parameter = with_gradient()
    alias = parameter.grad.detach()
    assert is_private(parameter, aliases=1)
    assert alias is not None
