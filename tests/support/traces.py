"""Runs what a trace has recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from waterflow.capture.recording import Recording


def computed(recording: Recording, inputs: Sequence[torch.Tensor]) -> list[Any]:
    """What the recorded graph computes of these tensors, operator by operator."""
    module = fx.GraphModule(recording.constants, recording.graph)
    with torch.no_grad():
        return list(fx.Interpreter(module).run(*inputs))
