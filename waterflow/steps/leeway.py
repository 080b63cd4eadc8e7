"""How far a captured step's numbers may be from the eager step's: not at all, but where kernels do
not repeat their own bits (`partitioner.graph.variation`). There the captured step is made twice of
the same state, and by what its two results differ, times a factor, the eager one may.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

import torch

from waterflow.partitioner.graph.step_graph import Input
from waterflow.partitioner.graph.variation import Varying
from waterflow.steps.prediction import Prediction
from waterflow.steps.same_bits import same_bits, same_number

#: Two differences of one kind are within this factor of each other, by their Euclidean norms.
_FACTOR = 32.0
#: By chance a tensor of fewer elements may have come out almost the same twice.
_FEW_ELEMENTS = 8


@dataclass
class Leeway:
    """By what a step differs from itself.

    Attributes:
        inputs: Euclidean norms of what persistent tensors that vary differ by.
        outputs: the same for what the step leaves behind.
        loss: what its loss differs by; None where it repeats its bits.
        is_exceeded: whether something that varies was found to differ by more: by a wrong graph, or
            by a rare chance.
    """

    inputs: Mapping[Input, float] = field(default_factory=dict)
    outputs: Mapping[Hashable, float] = field(default_factory=dict)
    loss: float | None = None
    is_exceeded: bool = False

    @staticmethod
    def between(varying: Varying, one: Prediction, other: Prediction) -> Leeway:
        """By what two results of one step differ, where they vary."""
        inputs = {key: one.tensors[key] for key in varying.inputs if key in one.tensors}
        outputs = {key: one.made[key] for key in varying.outputs if key in one.made}
        away_in = {key: distance(inputs[key], other.tensors[key]) for key in inputs}
        away_out = {key: distance(outputs[key], other.made[key]) for key in outputs}
        loss = abs(float(one.loss) - float(other.loss)) if varying.loss else None
        tensors = *inputs.values(), *outputs.values()
        each = zip(tensors, (*away_in.values(), *away_out.values()), strict=True)
        most = max((away / (_norm(tensor) or away) for tensor, away in each if away), default=0.0)
        return Leeway(
            {key: _at_least(away, inputs[key], most) for key, away in away_in.items()},
            {key: _at_least(away, outputs[key], most) for key, away in away_out.items()},
            loss,
        )

    def allows_input(self, key: Input, eager: torch.Tensor, captured: torch.Tensor) -> bool:
        """Whether a persistent tensor is what the eager step makes of it."""
        return self._allows(_is_near(eager, captured, self.inputs.get(key)), key in self.inputs)

    def allows_output(self, key: Hashable, eager: torch.Tensor, captured: torch.Tensor) -> bool:
        """Whether something that the step leaves behind is what the eager step leaves."""
        return self._allows(_is_near(eager, captured, self.outputs.get(key)), key in self.outputs)

    def allows_number(self, eager: float, captured: float) -> bool:
        """Whether a number that the step tells is the eager step's."""
        if same_number(eager, captured):
            return True
        if self.loss is None:
            return False
        ulp = torch.finfo(torch.float32).eps * abs(eager)
        return self._allows(abs(eager - captured) <= _FACTOR * self.loss + ulp, True)

    def _allows(self, is_near: bool, varies: bool) -> bool:
        self.is_exceeded = self.is_exceeded or (varies and not is_near)
        return is_near


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The Euclidean norm of what two tensors differ by; NaN where they hold no numbers."""
    return float((one.detach().double() - other.detach().double()).norm())


def _norm(tensor: torch.Tensor) -> float:
    return float(tensor.detach().double().norm())


def _at_least(away: float, tensor: torch.Tensor, most: float) -> float:
    """What a tensor differs by; one of few elements, as much as any does for its size."""
    return max(away, most * _norm(tensor)) if tensor.numel() < _FEW_ELEMENTS else away


def _is_near(eager: torch.Tensor, captured: torch.Tensor, own: float | None) -> bool:
    if same_bits(eager, captured):
        return True
    is_comparable = eager.shape == captured.shape and eager.dtype == captured.dtype
    if own is None or not is_comparable or not eager.is_floating_point():
        return False
    # Each number may be rounded another way, also where two results happened to be the same.
    rounding = torch.finfo(eager.dtype).eps * _norm(eager)
    away = distance(eager, captured)
    return math.isfinite(away) and away <= _FACTOR * own + rounding
