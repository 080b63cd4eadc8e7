"""Gradients are let go of beside threads that read them."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

from waterflow.job.gradients import held_gradients

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
