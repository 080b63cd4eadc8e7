"""The forward and backward pass as a graph: its inputs, its gradients, what it refuses."""

import pytest
import torch
from torch import nn

from tests.support.data import cross_entropy, rows
from tests.support.models import Mlp
from tests.support.steps import first_batch, job_of
from tests.support.traces import computed
from waterflow.capture.forward import mutated_by, trace_forward
from waterflow.capture.tracing import StateMovedError
from waterflow.common.errors import CaptureError
from waterflow.job.batch import flatten
from waterflow.partitioner.graph.effects import storage_ids
from waterflow.partitioner.graph.step_graph import Input

pytestmark = pytest.mark.cpu


def traced(model=Mlp, **options):
    job = job_of(model, **options)
    return job, trace_forward(job, flatten(first_batch(job)))


def sources(trace):
    nodes = [node for node in trace.recording.graph.nodes if node.op == "placeholder"]
    return dict(zip(trace.inputs, nodes, strict=True))


def test_inputs_are_parameters_buffers_and_the_batch_in_order():
    _, trace = traced(lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    kinds = [meaning.kind for meaning in trace.inputs]
    assert kinds == ["parameter"] * 4 + ["buffer"] * 3 + ["batch"] * 2
    assert Input("buffer", "1.running_mean") in trace.inputs


def test_the_loss_comes_before_the_backward_pass_and_gradients_after_it():
    _, trace = traced()
    nodes = list(trace.recording.graph.nodes)
    assert nodes.index(trace.loss) < trace.backward_start
    assert all(nodes.index(node) >= trace.backward_start for node in trace.gradients)


class Partly(Mlp):
    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(2))
        self.one.weight.requires_grad_(False)


def test_a_parameter_without_a_gradient_has_no_node():
    job, trace = traced(Partly)
    found = dict(zip(dict(job.model.named_parameters()), trace.gradients, strict=True))
    assert {name for name, node in found.items() if node is None} == {"unused", "one.weight"}


def test_the_graph_computes_what_the_loop_does():
    job, trace = traced()
    model, batch = job.model, first_batch(job)
    loss, *gradients = computed(trace.recording, [*model.parameters(), *batch])
    expected = cross_entropy(model, batch)
    expected.backward()
    assert torch.equal(loss, expected)
    for found, parameter in zip(gradients, model.parameters(), strict=True):
        assert torch.equal(found, parameter.grad)


class Averaging(Mlp):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        return super().forward(x - self.mean)


def test_a_buffer_that_is_given_a_new_tensor_is_written_into():
    job, trace = traced(Averaging)
    assert trace.reassigned == ["mean"]
    written = mutated_by(trace.recording)
    assert written == {sources(trace)[Input("buffer", "mean")]}
    assert job.model.mean.tolist() == [0.0] * 4  # nothing was executed


def test_views_share_their_source():
    _, trace = traced(lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 3)))
    weight = sources(trace)[Input("parameter", "1.weight")]
    (transposed,) = (
        node
        for node in trace.recording.graph.nodes
        if node.target is torch.ops.aten.t.default and node.args[0] is weight
    )
    assert storage_ids(transposed) == storage_ids(weight)


def test_what_is_traced_takes_a_batch_of_this_signature_only():
    job, trace = traced()
    other = trace_forward(job, flatten(rows(3)))
    shapes = [tuple(sources(t)[Input("batch", 0)].meta["val"].shape) for t in (trace, other)]
    assert shapes == [(8, 4), (3, 4)]


LOSSES = {
    "no scalar": (lambda model, batch: model(batch[0]), "one element, got a tensor of shape"),
    "no tensor": (lambda model, batch: 3.0, "one element, got 3.0"),
    "no gradient": (lambda model, batch: batch[0].sum(), "nothing to train"),
    "another formula": (lambda model, batch: model(batch[0]).prod(), "by another formula"),
    "a batch that is changed": (
        lambda model, batch: cross_entropy(model, (batch[0].add_(1), batch[1])),
        "changes its batch in place",
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_is_refused(name):
    loss, reason = LOSSES[name]
    with pytest.raises(CaptureError, match=reason) as caught:
        traced(loss=loss)
    assert "test_forward.py" in caught.value.reason


counts = []


def counting(model, batch):
    counts.append(1)
    return cross_entropy(model, batch)


def test_a_step_that_moves_state_is_told_apart_and_undone():
    with pytest.raises(StateMovedError, match="counts"):
        traced(loss=counting)
    assert counts == []
