"""Binds a job's steps to tensors: its own, or copies that a step may try itself on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from waterflow.executor.profile.measured import Scratch
from waterflow.executor.run.rng import JobRng
from waterflow.job.job import Job
from waterflow.job.optimizer_state import HyperKey, hyperparameters
from waterflow.partitioner.graph.step_graph import Input
from waterflow.steps.persistent import PersistentTensors
from waterflow.steps.prepared import PreparedStep


class StepBinder:
    """Gives a job's steps what they work on."""

    def __init__(self, job: Job, rng: JobRng, persistent: PersistentTensors) -> None:
        self.job = job
        self._rng = rng
        self._persistent = persistent

    def bind(self, step: PreparedStep) -> None:
        """Gives the step its persistent tensors and the job's random streams."""
        step.compiled.bind(self._persistent.inputs_of(step))
        step.compiled.tape.set_generators(*self._rng.generators)

    def registers(
        self, step: PreparedStep, values: Mapping[HyperKey, Any] | None = None
    ) -> dict[int, float]:
        """Values of the step's live hyperparameters, by register.

        Args:
            step: the step.
            values: all hyperparameters; None: as they are now.
        """
        values = hyperparameters(self.job.optimizer) if values is None else values
        return {register: values[key] for key, register in step.compiled.registers.items()}  # type: ignore[index]

    def twins(
        self, scratch: Scratch, steps: Sequence[PreparedStep], *, written_only: bool = False
    ) -> list[dict[Input, torch.Tensor]]:
        """What each step may be bound to in place of the job's own tensors.

        What the inputs share, their copies share.

        Args:
            scratch: where the copies are made.
            steps: the steps.
            written_only: copies only what a step writes to; the rest are the job's own.
        """
        inputs = [self._persistent.inputs_of(step) for step in steps]
        keyed = {(n, meaning): t for n, held in enumerate(inputs) for meaning, t in held.items()}
        mutated = {meaning for step in steps for meaning in step.graph.mutated}
        written = {
            key
            for key in keyed
            if not written_only or key[1] in mutated or key[1].kind == "constant"
        }
        copies = scratch.twins(keyed, written)
        return [
            {meaning: copies[number, meaning] for meaning in held}
            for number, held in enumerate(inputs)
        ]
