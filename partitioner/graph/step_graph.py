"""The step graph: one whole training step of a job as one flat graph of ATen operators."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx


@dataclass(frozen=True)
class Input:
    """What a placeholder of a step graph stands for.

    Attributes:
        kind: "parameter", "buffer", "gradient", "constant", "state", "batch" or "hyper".
        key: the parameter's or buffer's name, that of the gradient's parameter (a parameter of no
            module has its index in the optimizer), the constant's number, ``(parameter's index,
            state key)``, the batch tensor's number, or the hyperparameter's place in the optimizer.
    """

    kind: str
    key: Hashable

    @property
    def is_persistent(self) -> bool:
        """Whether it stands for a tensor that lives as long as the job."""
        return self.kind in ("parameter", "buffer", "gradient", "constant", "state")


@dataclass(eq=False)
class StepGraph:
    """A captured training step.

    Attributes:
        graph: placeholders carry ``meta["input"]`` (an `Input`), every tensor node ``meta["val"]``
            (a fake tensor, or a list of them), and those of a step of the user's own
            ``meta["gradient_mode"]`` (whether it is on; else that follows `forward_end`). Nodes are
            in execution order.
        loss: the node of the loss.
        outputs: what the step leaves behind: ``(parameter's index, state key)`` of optimizer state
            that the step creates, or ``("gradient", parameter's index)`` for an optimizer that runs
            eagerly, with the node that holds it.
        forward_end: the first node of the backward pass, None if there is none.
        constants: the tensors of the "constant" inputs.
        mutated: persistent inputs that the step writes to.
        plain_state: state entries created by this step that are not tensors.
        metrics: names of the numbers behind the loss in its node's tensor; none where it is alone.
    """

    graph: fx.Graph
    loss: fx.Node
    outputs: dict[Hashable, fx.Node] = field(default_factory=dict)
    forward_end: fx.Node | None = None
    constants: list[torch.Tensor] = field(default_factory=list)
    mutated: set[Input] = field(default_factory=set)
    plain_state: dict[tuple[int, Any], Any] = field(default_factory=dict)
    metrics: tuple[str, ...] = ()

    @property
    def inputs(self) -> dict[Input, fx.Node]:
        """Placeholders by what they stand for, in order."""
        return {node.meta["input"]: node for node in self.graph.nodes if node.op == "placeholder"}

    @property
    def nodes(self) -> list[fx.Node]:
        """The operations, in execution order."""
        return [node for node in self.graph.nodes if node.op == "call_function"]

    def fingerprint(self) -> str:
        """Equal for graphs that compute the same: operators, arguments, shapes, types, strides."""
        digest = hashlib.sha256()
        names: dict[fx.Node, str] = {}
        for node in self.graph.nodes:
            names[node] = f"%{len(names)}"
            target = node.meta["input"].kind if node.op == "placeholder" else str(node.target)
            arguments = fx.map_arg((node.args, node.kwargs), lambda n: names[n])
            mode = f" {node.meta['gradient_mode']}" if "gradient_mode" in node.meta else ""
            text = f"{node.op} {target} {arguments!r} {_layout(node)}{mode}\n"
            digest.update(text.encode())
        ends = [names[node] for node in (self.loss, *self.outputs.values())]
        digest.update(repr(ends).encode())
        return digest.hexdigest()


def tensors_of(node: fx.Node) -> Iterator[torch.Tensor]:
    """The (fake) tensors that a node's value consists of."""
    return _tensors(node.meta.get("val"))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)


def _layout(node: fx.Node) -> str:
    return str([(t.dtype, tuple(t.shape), t.stride()) for t in tensors_of(node)])
