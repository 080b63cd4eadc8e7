"""Profiles compiled steps: from disk where they are known, else by running them once on copies."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from waterflow.executor.device.base import Device
from waterflow.executor.plan.piled_step import Piles
from waterflow.executor.plan.step_memory import StepMemory
from waterflow.executor.profile.measured import Scratch
from waterflow.executor.run.rng import JobRng
from waterflow.job.batch import FlatBatch
from waterflow.partitioner.graph.step_graph import Input
from waterflow.partitioner.profile import Profile
from waterflow.steps.prepared import PreparedStep
from waterflow.steps.profile_cache import profile_name, read_profile, write_profile
from waterflow.steps.step_binder import StepBinder


@dataclass
class StepProfiler:
    """Finds out what a job's steps allocate, operator by operator.

    Attributes:
        device: where they run.
        rng: the job's random streams; never advanced here.
        threads: intra-op threads of the lanes, which a profile depends on.
        binder: gives the steps something to work on.
    """

    device: Device
    rng: JobRng
    threads: int
    binder: StepBinder

    def profile(self, steps: Sequence[PreparedStep], flat: FlatBatch) -> None:
        """Gives the steps their memory.

        Args:
            steps: in the order in which they come: a first step before the one that needs its
                state.
            flat: a batch for them.
        """
        names = [profile_name(step.graph, self.threads, self.device) for step in steps]
        kept_ones = map(read_profile, names, (len(step.compiled.tape) for step in steps))
        known = [profile for profile in kept_ones if profile is not None]
        if len(known) < len(steps):
            known = self.device.profile(lambda: self._measure(steps, flat))
            for name, profile in zip(names, known, strict=True):
                write_profile(name, profile)
        for step, kept in zip(steps, known, strict=True):
            # A kept one has the name of the job that was measured, which may have been another.
            profile = dataclasses.replace(kept, name=self.binder.job.name)
            if profile.num_nodes != len(step.compiled.tape):
                raise AssertionError("a profile does not match its step")
            step.memory = StepMemory(profile, self.device.alignment)
            step.piles = Piles(step.memory)

    def _measure(self, steps: Sequence[PreparedStep], flat: FlatBatch) -> list[Profile]:
        """Runs the steps in turn on scratch copies of all that they write to."""
        scratch = Scratch(self.device)
        profiles: list[Profile] = []
        made: dict[Input, torch.Tensor] = {}
        generators = self.rng.copy().generators
        try:
            twins = self.binder.twins(scratch, steps, written_only=True)
            batch = scratch.batch(flat.tensors)
            for step, tensors in zip(steps, twins, strict=True):
                inputs, registers = {**tensors, **made}, self.binder.registers(step)
                scratch.bind(step.compiled, inputs, batch, generators, registers)
                profile = scratch.measure(
                    step.compiled, name=self.binder.job.name, repeatable=not step.creates_state
                )
                profiles.append(profile)
                for key, slot in step.compiled.outputs.items():
                    made[Input("state", key)] = step.compiled.tape.slot(slot)
            made.clear()
            del twins, batch
        finally:
            for step in steps:
                step.compiled.unbind()
            scratch.close()
        return profiles
