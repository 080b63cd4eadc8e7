"""Profiles compiled steps: from disk where they are known, else by running them once on copies."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from waterflow.capture.tracing import capture_error, users_line
from waterflow.executor.device.base import Device
from waterflow.executor.plan.piled_step import Piles
from waterflow.executor.plan.step_memory import StepMemory
from waterflow.executor.profile.measured import Scratch
from waterflow.executor.profile.usage import UseWatch
from waterflow.executor.run.rng import JobRng
from waterflow.executor.run.step_use import StepUse
from waterflow.executor.run.tape import CompiledStep, compile_step
from waterflow.job.batch import FlatBatch
from waterflow.partitioner.graph.step_graph import Input
from waterflow.partitioner.profile import Profile
from waterflow.steps.prepared import PreparedStep
from waterflow.steps.profile_cache import (
    LEAST_SECONDS,
    any_profiles,
    profile_name,
    read_profile,
    write_profile,
)
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

        @functools.cache
        def name(step: PreparedStep) -> str:
            return profile_name(step.graph, self.threads, self.device, flat)

        known: list[Profile] = []
        if any_profiles():
            found = [read_profile(name(step), len(step.compiled.tape)) for step in steps]
            known = [profile for profile in found if profile is not None]
        if len(known) < len(steps):
            began = time.perf_counter()
            known = self.device.profile(lambda: self._measure(steps, flat))
            if time.perf_counter() - began >= LEAST_SECONDS:
                for step, profile in zip(steps, known, strict=True):
                    write_profile(name(step), profile)
        for step, kept in zip(steps, known, strict=True):
            # A kept one has the name of the job that was measured, which may have been another.
            profile = dataclasses.replace(kept, name=self.binder.job.name)
            if profile.num_nodes != len(step.compiled.tape):
                raise AssertionError("a profile does not match its step")
            if profile.surviving_bytes and not step.graph.outputs:
                job = self.binder.job
                raise capture_error(
                    job.name,
                    "what it makes outlives it in a tensor that others have (`Tensor.set_`, say)",
                    users_line(None, job.function),
                )
            step.memory = StepMemory(profile, self.device.alignment)
            step.piles = Piles(step.memory)

    def observe(self, step: PreparedStep, first: PreparedStep | None, flat: FlatBatch) -> StepUse:
        """What a step uses when.

        Args:
            step: it stays bound as it is.
            first: the one that makes the state that it needs; None where the state exists.
            flat: a batch for them.
        """
        twins = [
            PreparedStep(one.graph, compile_step(one.graph, one.compiled.lowered), one.optimizer)
            for one in (first, step)
            if one is not None
        ]
        watched: list[UseWatch] = []

        def watch(bound: CompiledStep, arena: Any) -> UseWatch:
            where, alignment = self.device.tensors, self.device.alignment
            watched.append(UseWatch(bound, arena, where, alignment))
            return watched[0]

        profiles = self.device.profile(lambda: self._measure(twins, flat, watch))
        return watched[0].result(profiles[-1])

    def _measure(
        self,
        steps: Sequence[PreparedStep],
        flat: FlatBatch,
        watch: Callable[[CompiledStep, Any], UseWatch] | None = None,
    ) -> list[Profile]:
        """Runs the steps in turn on scratch copies of all that they write to.

        Args:
            steps: in the order in which they come.
            flat: a batch for them.
            watch: makes the watch of the last one, bound, and the arena.
        """
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
                is_watched = watch is not None and step is steps[-1]
                profile = scratch.measure(
                    step.compiled,
                    name=self.binder.job.name,
                    repeatable=not step.creates_state,
                    watch=watch(step.compiled, scratch.arena) if is_watched else None,  # type: ignore[misc]
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
