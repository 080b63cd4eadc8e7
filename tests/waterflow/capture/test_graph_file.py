"""Traces as JSON: what is read makes the graph that was traced."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.nn import functional

import waterflow as wf
from tests.support.zoo_jobs import BERT, CNN, LSTM, TABLE, jobs_of
from waterflow.capture.forward import trace_forward
from waterflow.capture.graph_file import Traces, read, written
from waterflow.capture.graph_values import NotPlainError
from waterflow.capture.join import join
from waterflow.capture.optimizer_cache import OptimizerTraces
from waterflow.job.batch import flatten

pytestmark = pytest.mark.virtual


def traces_of(job):
    forward = trace_forward(job, flatten(next(iter(job.data))))
    first, steady = OptimizerTraces().of(job, forward)
    return Traces(forward, first, steady)


def nothing(tensor):
    return None


def small_job(loss, optimizer=torch.optim.Adam, **options):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    made = optimizer(model.parameters(), lr=0.1, **options)
    data = [(torch.randn(5, 4), torch.arange(5) % 3)]
    return wf.Job("small", model=model, optimizer=made, loss=loss, data=data)


def plain_loss(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def assert_same(job, traces, found):
    assert found.forward.inputs == traces.forward.inputs
    for one, other in ((traces.first, found.first), (traces.steady, found.steady)):
        if one is None:
            assert other is None
            continue
        assert (one.inputs, one.constants, one.guards) == (
            other.inputs,
            other.constants,
            other.guards,
        )
        assert (one.state_before, one.state_after) == (other.state_before, other.state_after)
        assert one.fixed == other.fixed
        graph, again = join(job, traces.forward, one), join(job, found.forward, other)
        assert graph.fingerprint() == again.fingerprint()
        assert graph.mutated == again.mutated
        assert graph.plain_state == again.plain_state
        assert [*graph.inputs] == [*again.inputs]
        assert [*graph.outputs] == [*again.outputs]


@pytest.mark.parametrize("task", [BERT, LSTM, TABLE, CNN])
def test_what_is_read_is_what_was_traced(task):
    (job,) = jobs_of(task)
    traces = traces_of(job)
    content = written(traces, nothing)
    found = read(content, {})
    assert_same(job, traces, found)
    assert written(found, nothing) == content


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.NAdam, {}),
        (torch.optim.Adagrad, {"lr_decay": 0.1}),
        (torch.optim.RMSprop, {"centered": True}),
        (torch.optim.Adadelta, {}),
    ],
)
def test_optimizers_are_read_with_their_live_numbers(optimizer, options):
    job = small_job(plain_loss, optimizer, **options)
    traces = traces_of(job)
    assert_same(job, traces, read(written(traces, nothing), {}))


def test_a_tensor_by_reference_is_the_readers_own():
    weights, others = torch.ones(3), torch.ones(3)

    def loss(model, batch):
        return functional.cross_entropy(model(batch[0]), batch[1], weights)

    traces = traces_of(small_job(loss))
    content = written(traces, lambda tensor: 7 if tensor is weights else None)
    found = read(content, {7: others})
    assert [*found.forward.recording.constants.values()] == [others]
    assert found.forward.recording.constants.popitem()[1] is others
    with pytest.raises(NotPlainError, match="by reference"):
        written(traces, nothing)
    with pytest.raises(KeyError):
        read(content, {})


def test_literals_are_written_with_their_bits():
    def loss(model, batch):
        shift = torch.tensor([0.1, -0.0, float("inf")]).clamp(max=3.0)
        return functional.cross_entropy(model(batch[0]) + shift * torch.tensor(0.3), batch[1])

    job = small_job(loss)
    traces = traces_of(job)
    found = read(written(traces, nothing), {})
    before = traces.forward.recording.constants
    assert before.keys() == found.forward.recording.constants.keys()
    for name, tensor in found.forward.recording.constants.items():
        assert tensor.dtype == before[name].dtype
        assert tensor.numpy().tobytes() == before[name].numpy().tobytes()


def test_an_operator_of_an_extension_is_not_written():
    library = torch.library.Library("waterflow_test_graph_file", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    library.impl("twice", lambda x: torch.empty_like(x), "Meta")

    def loss(model, batch):
        with torch.no_grad():
            given = torch.ops.waterflow_test_graph_file.twice(batch[0])
        return functional.cross_entropy(model(given), batch[1])

    with pytest.raises(NotPlainError, match="operator"):
        written(traces_of(small_job(loss)), nothing)


def test_a_hyperparameter_that_is_a_tensor_is_not_written():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    rate = torch.tensor(0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, capturable=False, foreach=False)
    data = [(torch.randn(5, 4), torch.arange(5) % 3)]
    job = wf.Job("small", model=model, optimizer=optimizer, loss=plain_loss, data=data)
    with pytest.raises(NotPlainError):
        written(traces_of(job), nothing)


def test_what_is_new_in_a_trace_is_not_lost_in_silence():
    traces = traces_of(small_job(plain_loss))
    traces.forward.news = 1
    with pytest.raises(NotPlainError, match="form"):
        written(traces, nothing)


def test_nothing_but_operators_of_torch_is_called():
    document = json.loads(written(traces_of(small_job(plain_loss)), nothing))
    for name in ("os.system.default", "builtins.eval.default", "aten.__class__.default"):
        document["operators"][0] = [name, ""]
        with pytest.raises((ValueError, AttributeError)):
            read(json.dumps(document).encode(), {})
