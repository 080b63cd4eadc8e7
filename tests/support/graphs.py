"""Step graphs of plain functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from waterflow.capture.stride_rules import CaptureMode
from waterflow.capture.tracing import fake_twin, trace
from waterflow.partitioner.graph.step_graph import Input, StepGraph


def step_of(
    function: Callable[..., Sequence[Any]], *tensors: torch.Tensor, kind: str = "batch"
) -> StepGraph:
    """The step graph of a function that returns a loss and more tensors, which are its outputs."""
    mode = CaptureMode()
    return step_of_twins(function, mode, [fake_twin(mode, tensor) for tensor in tensors], kind)


def step_of_twins(
    function: Callable[..., Sequence[Any]], mode: CaptureMode, twins: Sequence[Any], kind: str
) -> StepGraph:
    """The same of fake tensors."""
    graph = trace(lambda _, given: function(*given), mode, twins).graph
    for number, node in enumerate(n for n in graph.nodes if n.op == "placeholder"):
        node.meta["input"] = Input(kind, number)
    (result,) = next(node for node in graph.nodes if node.op == "output").args
    loss, *others = result
    return StepGraph(graph, loss, {("out", i): node for i, node in enumerate(others)})
