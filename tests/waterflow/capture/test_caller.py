"""The context of the caller's thread surrounds a job's Python on every other thread."""

from __future__ import annotations

import contextlib
import contextvars
import threading

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import waterflow as wf
from tests.support.data import cross_entropy, rows
from tests.support.differences import MEMORY
from tests.support.models import Mlp
from waterflow.capture.caller import CallerContext
from waterflow.executor.run.rng import JobRng

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]

LEVEL = contextvars.ContextVar("level", default=0)


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def level(value):
    token = LEVEL.set(value)
    yield
    LEVEL.reset(token)


@contextlib.contextmanager
def default_device(device):
    torch.set_default_device(device)
    yield
    torch.set_default_device(None)


def autocast(**options):
    return torch.autocast("cpu", dtype=torch.bfloat16, **options)


def hooks():
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)


#: What surrounds the caller, what tells, and why steps cannot be captured in it.
CONTEXTS = {
    "nothing": (contextlib.nullcontext, lambda: LEVEL.get() == 0, None),
    "autocast": (
        lambda: autocast(cache_enabled=False),
        lambda: torch.is_autocast_enabled("cpu") and not torch.is_autocast_cache_enabled(),
        None,
    ),
    "autocast with a cache": (autocast, lambda: torch.is_autocast_enabled("cpu"), "autocast"),
    "no gradients": (torch.no_grad, lambda: not torch.is_grad_enabled(), None),
    "inference": (torch.inference_mode, torch.is_inference_mode_enabled, None),
    "function mode": (
        Functions,
        lambda: len(torch.overrides._get_current_function_mode_stack()) == 1,
        "function mode Functions",
    ),
    "dispatch mode": (
        Dispatches,
        lambda: torch.utils._python_dispatch._len_torch_dispatch_stack() == 1,
        "dispatch mode Dispatches",
    ),
    "hooks": (
        hooks,
        lambda: torch._C._autograd._top_saved_tensors_default_hooks(False) is not None,
        "hooks for saved tensors",
    ),
    "device": (
        lambda: default_device("meta"),
        lambda: torch.empty(1).device.type == "meta",
        None,
    ),
    "variable": (lambda: level(3), lambda: LEVEL.get() == 3, None),
}


def elsewhere(function):
    """What a function answers, or raises, on a new thread."""
    found = []

    def run():
        try:
            found.append(function())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("name", CONTEXTS)
def test_python_elsewhere_runs_in_the_same_context(name):
    around, tells, opaque = CONTEXTS[name]
    with around():
        caller = CallerContext()
    assert caller.opaque is None if opaque is None else opaque in caller.opaque
    rng = JobRng(0)

    def both():
        inside = caller.run(rng, tells)
        after = name == "nothing" or not tells()
        return inside, after

    assert elsewhere(both) == (True, True)


def test_the_context_of_a_thread_comes_back_after_an_error():
    with autocast(cache_enabled=False), torch.no_grad():
        caller = CallerContext()

    def failing():
        with contextlib.suppress(ZeroDivisionError):
            caller.run(JobRng(0), lambda: 1 // 0)
        return torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()

    assert elsewhere(failing) == (False, True)


def test_variables_last_from_call_to_call_but_for_calls_apart():
    caller, rng = CallerContext(), JobRng(0)
    caller.run(rng, lambda: LEVEL.set(1))
    assert caller.run_apart(rng, lambda: (LEVEL.set(2), LEVEL.get())[1]) == 2
    caller.look(lambda: LEVEL.set(3))
    assert caller.run(rng, LEVEL.get) == 1
    assert LEVEL.get() == 0


def job_of(seen):
    torch.manual_seed(11)
    net = Mlp()

    def on_step(result):
        seen.append((LEVEL.get(), torch.is_autocast_enabled("cpu")))
        LEVEL.set(LEVEL.get() + 1)

    return wf.Job(
        "a",
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        loss=cross_entropy,
        data=[rows(8)] * 6,
        seed=5,
        on_step=on_step,
    )


@pytest.mark.filterwarnings("ignore::waterflow.OpaqueStepWarning")
@pytest.mark.parametrize("name", ["nothing", "autocast", "autocast with a cache", "variable"])
def test_a_job_trains_in_the_context_of_its_submitter(name):
    around = CONTEXTS[name][0]
    expected, found = [], []
    with around():
        loop = contextvars.copy_context()  # what it sets is not to last
        losses = loop.run(lambda: wf.run_eager(job_of(expected), threads=1).losses)
    with around(), wf.Engine(MEMORY, threads=1) as engine:
        handle = engine.submit(job_of(found))
        report = handle.result()
    assert report.losses == losses
    assert found == expected
