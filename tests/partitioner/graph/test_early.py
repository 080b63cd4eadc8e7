"""Early updates compute the same, and gradients are gone as soon as they were used."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import waterflow as wf
from tests.support.differences import MEMORY, assert_same_numbers
from tests.support.steps import steady_steps
from waterflow.engine.engine import Engine
from waterflow.partitioner.graph.early import update_early
from waterflow.partitioner.graph.effects import dependencies

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]

DEPTH, WIDTH = 12, 64
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.01, weight_decay=0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, 0.001),
    "adamw": lambda p: torch.optim.AdamW(p, 0.001),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.001, momentum=0.9),
}


def deep_job(optimizer="sgd", **options):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)])
    generator = torch.Generator().manual_seed(1)
    return wf.Job(
        "deep",
        model=model,
        optimizer=OPTIMIZERS[optimizer](model.parameters()),
        loss=lambda m, x: m(x).square().mean(),
        data=[torch.randn(4, WIDTH, generator=generator)] * 7,
        **options,
    )


def run_of(job, **options):
    with Engine(MEMORY, threads=1, **options) as engine:
        return engine.submit(job)._job


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_gradients_are_not_all_there_at_once(optimizer):
    plain = run_of(deep_job(optimizer))
    (steady,) = steady_steps(plain)
    persistent = plain.needs.memory.persistent_bytes
    gradients = DEPTH * WIDTH * WIDTH * 4
    assert steady.memory.extent > gradients
    job, twin = deep_job(optimizer), deep_job(optimizer)
    job.memory_limit = persistent + gradients // 2
    limited = run_of(job)
    assert_same_numbers(twin, wf.run_eager(twin, threads=1), job, limited.report)
    (early,) = steady_steps(limited)
    assert early.spill is None, "early updates suffice"
    assert early.memory.extent < gradients / 2


def test_the_order_keeps_what_nodes_depend_on():
    (step,) = steady_steps(run_of(deep_job("adam")))
    nodes = step.graph.nodes
    early = update_early(step.graph)
    assert sorted(str(node.target) for node in early.nodes) == sorted(str(n.target) for n in nodes)
    needed = dependencies(early.nodes)
    assert all(other < index for index, others in needed.items() for other in others)
    border = nodes.index(step.graph.forward_end)
    assert early.nodes.index(early.forward_end) == border
    assert [str(n.target) for n in early.nodes[:border]] == [str(n.target) for n in nodes[:border]]


def test_clipping_by_the_norm_of_all_gradients_leaves_little_to_move():
    """All updates need all gradients: the order may change nothing, and the numbers do not."""
    need = run_of(deep_job(clip_grad_norm=0.1)).needs.memory
    job, twin = deep_job(clip_grad_norm=0.1), deep_job(clip_grad_norm=0.1)
    job.memory_limit = need.persistent_bytes + need.step_bytes * 3 // 4
    report = run_of(job).report
    assert_same_numbers(twin, wf.run_eager(twin, threads=1), job, report)
