"""What both traces share: twins of tensors, whose line an error names, constants by reference."""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from waterflow.capture.stride_rules import CaptureMode
from waterflow.capture.tracing import (
    JobMode,
    StateMovedError,
    capture_error,
    fake_twin,
    functions_of,
    is_of_job,
    reason_of,
    trace,
    users_line,
)
from waterflow.common.errors import CaptureError
from waterflow.job.batch import flatten

pytestmark = pytest.mark.cpu

HERE = str(Path(__file__))


def raised(function):
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


# Errors


def test_the_line_is_the_users_though_the_packages_own_code_raises():
    def reads_a_batch():
        flatten([object()])

    line = reads_a_batch.__code__.co_firstlineno + 1
    assert users_line(raised(reads_a_batch)) == f"{HERE}:{line} in reads_a_batch"


def test_the_line_is_the_users_though_torch_raises():
    def multiplies():
        torch.nn.functional.linear(torch.zeros(2, 3), torch.zeros(2, 4))

    assert users_line(raised(multiplies)).endswith("in multiplies")


def test_without_a_line_the_function_is_named():
    def loss():
        pass

    first = loss.__code__.co_firstlineno
    assert users_line(None, functools.partial(loss)) == f"{HERE}:{first} in loss"
    assert users_line(None, len) == "the model's code"


class Callable:
    def __call__(self):
        pass

    def method(self):
        pass


def test_functions_behind_callables():
    assert functions_of(Callable()) == [Callable.__call__]
    assert functions_of(Callable().method) == [Callable.method]
    assert functions_of(None) == []


def test_a_reason_is_one_line():
    assert reason_of(ValueError("first\nsecond")) == "ValueError: first"
    assert reason_of(KeyError()) == "KeyError: no message"


def test_an_error_says_where_why_and_what_to_do():
    error = capture_error("a", "it rolls dice", "file.py:3 in f", StateMovedError)
    assert isinstance(error, CaptureError)
    assert "job 'a' cannot be captured at file.py:3 in f: it rolls dice." in str(error)
    assert "capture=False" in str(error)
    assert error.reason == "it rolls dice (file.py:3 in f)"


# Twins and traces


def test_a_twin_has_the_layout_and_the_hooks_and_no_gradient():
    real, called = nn.Parameter(torch.zeros(3, 4)), []
    real.grad = torch.ones(3, 4)
    real.register_hook(called.append)
    twin = fake_twin(CaptureMode(), real)
    assert tuple(twin.shape) == (3, 4)
    assert twin.requires_grad
    assert twin.grad is None
    with twin.fake_mode:
        twin.sum().backward()
    assert len(called) == 1
    assert real.grad.sum() == 12


def test_a_tensor_that_has_only_a_layout_counts_as_one_of_the_host():
    assert fake_twin(CaptureMode(), torch.zeros(2, device="meta")).device.type == "cpu"


def test_whose_fake_a_tensor_is():
    with JobMode():
        of_job = torch.zeros(2)
    assert is_of_job(of_job)
    assert not is_of_job(fake_twin(CaptureMode(), torch.zeros(2)))
    assert not is_of_job(torch.zeros(2))


def traced(function, *reals):
    mode = CaptureMode()
    twins = [fake_twin(mode, real) for real in reals]
    return trace(lambda _, tensors: function(tensors), mode, twins, reals)


def test_a_real_tensor_stands_for_its_twin_wherever_the_code_meets_it():
    real = torch.ones(2)
    recording = traced(lambda tensors: [real * tensors[0]], real)
    (product,) = (node for node in recording.graph.nodes if node.op == "call_function")
    assert product.args[0] is product.args[1]


def test_another_real_tensor_is_a_constant_by_reference_and_is_not_computed_with():
    count, given = torch.zeros(()), torch.ones(2)

    def counting(tensors):
        count.add_(1)
        return [tensors[0] + count]

    recording = traced(counting, given)
    assert count == 0
    constants = [node for node in recording.graph.nodes if node.op == "get_attr"]
    assert {id(recording.constant_of(node)) for node in constants} == {id(count)}


def test_what_a_trace_cannot_record_is_refused():
    def assigning(tensors):
        tensors[0].data = torch.zeros(2)

    with pytest.raises(RuntimeError, match=r"assigns to \.data"):
        traced(assigning, torch.ones(2))


def test_real_tensors_may_be_swapped_after_a_trace():
    one, other = torch.ones(2), torch.zeros(2)
    traced(lambda tensors: [tensors[0] * 2], one)
    torch.utils.swap_tensors(one, other)
    assert one.sum() == 0


@pytest.mark.parametrize("more", [lambda made: made, torch.clone, torch.Tensor.double])
def test_an_array_becomes_a_constant_of_the_host(more):
    """``from_numpy`` is not seen by torch's function modes, so it calls operators with one on."""
    array = np.arange(3, dtype=np.float32)
    recording = traced(lambda tensors: [tensors[0] * more(torch.from_numpy(array))], torch.ones(3))
    constants = recording.constants.values()
    assert constants
    for constant in constants:
        assert constant.device.type == "cpu"
        assert torch.equal(constant, torch.from_numpy(array))


@pytest.mark.usefixtures("validates")
def test_a_trace_compiles_nothing_and_keeps_nobody_else_from_it():
    made = []

    def backend(graph, inputs):
        made.append(threading.get_ident())
        return graph

    @functools.partial(torch.compile, backend=backend, fullgraph=True)
    def doubled(rows):
        return torch.tanh(rows) * 2

    mode = CaptureMode()
    twin, rows = fake_twin(mode, torch.ones(3)), torch.ones(3)
    elsewhere = threading.Thread(target=doubled, args=(rows,))

    def traced(recorder, tensors):
        elsewhere.start()
        result = doubled(tensors[0])
        elsewhere.join()
        return [result]

    recording = trace(traced, mode, [twin])
    calls = [str(node.target) for node in recording.graph.nodes if node.op == "call_function"]
    assert calls == ["aten.tanh.default", "aten.mul.Tensor"]
    assert made == [elsewhere.ident]
    doubled(torch.ones(4))
    assert len(made) == 2


def test_a_stance_that_is_set_during_a_trace_stays_as_its_thread_wants_it():
    stances = importlib.import_module("torch._dynamo.eval_frame")
    before, entered = stances._stance, contextlib.ExitStack()

    def traced(recorder, tensors):
        worker = threading.Thread(
            target=lambda: entered.enter_context(torch.compiler.set_stance("eager_on_recompile"))
        )
        worker.start()
        worker.join()
        return [tensors[0] * 2]

    mode = CaptureMode()
    trace(traced, mode, [fake_twin(mode, torch.ones(3))])
    assert stances._stance.stance == "eager_on_recompile"
    entered.close()
    assert stances._stance.stance == before.stance == "default"
    stances._stance = before
