"""Waterwave's order computes the same: on tapes, with in-place updates, BatchNorm and dropout."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import waterflow as wf
from waterflow.capture.forward import trace_forward
from waterflow.capture.join import gradient_layouts, join
from waterflow.capture.optimizer import trace_optimizer
from waterflow.executor.run.tape import compile_step
from waterflow.job.batch import flatten
from waterflow.job.optimizer_state import hyperparameters, state_layout
from waterflow.partitioner.graph.effects import dependencies
from waterflow.partitioner.graph.reorder import in_bfs_order
from waterflow.partitioner.graph.step_graph import Input, StepGraph

pytestmark = pytest.mark.cpu


def make_job() -> wf.Job:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 12),
        nn.BatchNorm1d(12),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        nn.Linear(12, 12),
        nn.Dropout(0.3),
        nn.Linear(12, 3),
    )
    batch = torch.randn(16, 6), torch.randint(3, (16,))
    return wf.Job(
        "a",
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]),
        data=[batch],
    )


def capture(job: wf.Job) -> StepGraph:
    batch = flatten(next(iter(job.data)))
    forward = trace_forward(job, batch)
    layout = gradient_layouts(job, forward)
    return join(job, forward, trace_optimizer(job, layout, state_layout(job.optimizer)))


def execute(job: wf.Job, step: StepGraph, steps: int) -> list[float]:
    compiled = compile_step(step)
    tensors = {Input("parameter", n): p for n, p in job.model.named_parameters()}
    tensors |= {Input("buffer", n): b for n, b in job.model.named_buffers()}
    tensors |= {Input("constant", i): c for i, c in enumerate(step.constants)}
    compiled.bind(tensors)
    compiled.tape.set_generators(torch.Generator().manual_seed(3), None)
    compiled.tape.set_batch(list(next(iter(job.data))))
    values = hyperparameters(job.optimizer)
    for key, register in compiled.registers.items():
        compiled.tape.set_register(register, values[key])  # type: ignore[index]
    losses = []
    for _ in range(steps):
        compiled.tape.run(0, len(compiled.tape))
        losses.append(compiled.tape.loss)
    return losses


def test_bfs_order_is_another_order_with_the_same_numbers() -> None:
    job = make_job()
    step = capture(job)
    twin = copy.copy(job)
    twin.model = copy.deepcopy(job.model)
    reordered = in_bfs_order(step)
    assert [str(n.target) for n in reordered.nodes] != [str(n.target) for n in step.nodes]
    assert execute(job, step, 4) == execute(twin, reordered, 4)
    for name, value in job.model.state_dict().items():
        assert torch.equal(twin.model.state_dict()[name], value), name


def test_dependencies_point_backwards_and_keep_writes_and_draws_in_order() -> None:
    step = capture(make_job())
    nodes = step.nodes
    needed = dependencies(nodes)
    assert all(before < index for index, all_before in needed.items() for before in all_before)
    draws = [i for i, n in enumerate(nodes) if "bernoulli_" in str(n.target)]
    assert draws[0] in needed[draws[1]]
