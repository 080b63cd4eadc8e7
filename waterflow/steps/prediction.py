"""What a captured step makes of a job's present state, found out on copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from waterflow.executor.profile.measured import Scratch
from waterflow.job.batch import FlatBatch
from waterflow.partitioner.graph.step_graph import Input
from waterflow.report.step_loss import with_metrics
from waterflow.steps.job_steps import JobSteps
from waterflow.steps.prepared import PreparedStep


@dataclass
class Prediction:
    """What a captured step makes of the present state, computed on copies.

    Attributes:
        loss: its loss.
        tensors: copies of the persistent tensors, after the step.
        made: the step's outputs: new state of the optimizer, or gradients, by their keys.
        streams: where the host's random stream stands before the step, and after it.
    """

    loss: float
    tensors: dict[Input, torch.Tensor]
    made: dict[Any, torch.Tensor]
    streams: tuple[torch.Tensor, torch.Tensor]

    def draws_as(self, before: torch.Tensor, after: torch.Tensor) -> bool:
        """Whether an eager step that has moved the stream so has drawn what this one has.

        Where the job's data are fetched ahead, the stream may move on between the two steps, which
        then draw nothing.
        """
        if torch.equal(before, self.streams[0]):
            return torch.equal(after, self.streams[1])
        return torch.equal(before, after) and torch.equal(*self.streams)


def predict(steps: JobSteps, step: PreparedStep, flat: FlatBatch) -> Prediction:
    """Makes the step on copies; the job's tensors and random streams stay as they are.

    Args:
        steps: the job's.
        step: its captured form. It is left without tensors.
        flat: the batch, taken apart.

    Raises:
        Whatever the step raises.
    """
    scratch = Scratch(steps.device)
    generators = steps.rng.copy().generators
    before = generators[0].get_state()
    try:
        (twins,) = steps.binder.twins(scratch, [step])
        batch = scratch.batch(flat.tensors)
        scratch.bind(step.compiled, twins, batch, generators, steps.binder.registers(step))
        loss = scratch.run(step.compiled)
        if step.graph.metrics:
            loss = with_metrics(loss, step.graph.metrics, step.compiled.tape.metrics)
        tape = step.compiled.tape
        made = {key: tape.slot(slot) for key, slot in step.compiled.outputs.items()}
    finally:
        step.compiled.unbind()
        scratch.close()
    return Prediction(loss, twins, made, (before, generators[0].get_state()))
