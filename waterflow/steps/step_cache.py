"""Decides which specialization serves a batch: one that is kept, a new capture, or none."""

from __future__ import annotations

import functools
import threading
from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Any

import torch

from waterflow.account.account import Account
from waterflow.capture.own_step import UnsettledError
from waterflow.capture.set_numbers import SetNumbers
from waterflow.capture.tracing import capture_error, users_line
from waterflow.common.errors import CaptureError
from waterflow.job.batch import FlatBatch
from waterflow.job.job import Job
from waterflow.job.optimizer_state import (
    hyperparameters,
    same_hyperparameters,
    trained_parameters,
)
from waterflow.steps.known_questions import KnownQuestions
from waterflow.steps.opacity import Opacity
from waterflow.steps.persistent import PersistentTensors
from waterflow.steps.prepared import CheckedStep, PreparedBatch, PreparedStep, Specialization
from waterflow.steps.recaptures import Recaptures, StillChangingError
from waterflow.steps.specializations import Specializations
from waterflow.steps.step_builder import StepBuilder
from waterflow.steps.trials import Trials

#: More step graphs than this for one job mean that its batches never repeat a shape.
MAX_SHAPES = 64


class ManyShapesError(CaptureError):
    """Another shape of batches would be one too many; those known are captured all the same.

    Users see a `CaptureError`; this one tells the preparer not to give up the job's other batches.
    """


class StepCache:
    """A job's captured steps, each as long as what it assumes holds.

    The feeder's thread prepares batches while the thread that runs the job's steps, the engine's or
    a lane's, refreshes, renews and judges. `_lock` guards captures: who makes one holds it. The
    feeder waits for the steps under way before it takes the lock, and they begin none meanwhile,
    so whatever a step changes at its end (kept captures, counts, the ledger of persistent tensors)
    is never changed beside a capture. What is kept may be looked at by anybody without a lock.

    Attributes:
        captures: how many have been made.
        questions: what the captured steps ask of their batches.
        recaptures: captures made because something that a step reads had changed.
    """

    def __init__(
        self,
        job: Job,
        specializations: Specializations,
        persistent: PersistentTensors,
        builder: StepBuilder,
        opacity: Opacity,
        trials: Trials,
    ) -> None:
        self._job = job
        self._kept = specializations
        self._persistent = persistent
        self._builder = builder
        self._opacity = opacity
        self._trials = trials
        self.captures = 0
        self.questions = KnownQuestions()
        self.recaptures = Recaptures(job.name, functools.partial(SetNumbers.of, job))
        self._over: set[PreparedStep] = set()  # first steps whose state is there
        self._lock = threading.RLock()

    @property
    def is_empty(self) -> bool:
        """Whether no batch's signature is known yet."""
        return not len(self._kept)

    def steps(self) -> list[PreparedStep]:
        """All prepared steps."""
        return self._kept.steps()

    def specializations(self) -> list[Specialization]:
        """All that is kept."""
        return self._kept.all()

    def still(self) -> AbstractContextManager[Any]:
        """Inside, nothing is captured: waits for a capture under way."""
        return self._lock

    @property
    def is_capturing(self) -> bool:
        """Whether some other thread captures at this moment."""
        free = self._lock.acquire(blocking=False)
        if free:
            self._lock.release()
        return not free

    def known(
        self, signature: Hashable, preferred: Specialization | None = None
    ) -> Specialization | None:
        """What was captured for such batches last, right or not; None where there is nothing.

        Args:
            signature: of the batches.
            preferred: which one to take where it is among several.
        """
        kept = self._kept.of(signature)
        return preferred if preferred in kept else next(reversed(kept), None)

    def valid(self, signature: Hashable) -> Specialization | None:
        """What is kept for such batches and still right; None where there is nothing."""
        return self._kept.valid(signature)

    def valid_or_captured(self, flat: FlatBatch) -> Specialization:
        """What is kept for such a batch and still right, or a new capture.

        Raises:
            TrialNeeded: an eager step has to come first, under observation.
            StillChangingError: eager steps come first until what these read has settled.
            CaptureError, or whatever the user's code raises: it cannot be captured exactly.
        """
        with self._lock:
            flat = self.questions.answered(flat)
            return self._kept.valid(flat.signature) or self._capture(flat)

    def is_fresh(self, prepared: PreparedBatch) -> bool:
        """Whether the batch can run as it was prepared."""
        specialization = prepared.specialization
        if specialization is None:
            return True
        assert prepared.flat is not None
        is_right = self.has(prepared) and specialization.assumptions.hold()
        return is_right and prepared.flat.gives(prepared.flat.answers)

    def has(self, prepared: PreparedBatch) -> bool:
        """Whether the capture that serves the batch is kept; whether it is right is another
        question."""
        assert prepared.flat is not None
        kept = self._kept.of(prepared.flat.signature)
        return self._opacity.step is None and prepared.specialization in kept

    def step_for(self, specialization: Specialization) -> PreparedStep | None:
        """The step to run now; None where the hyperparameters have outgrown the graph."""
        step = specialization.steady
        if specialization.first is not None and not self._is_over(specialization.first):
            step = specialization.first
        if step is None or step.optimizer is None:
            return step
        values = hyperparameters(self._job.optimizer)
        if not same_hyperparameters(step.valid_values, values):
            if not step.optimizer.valid_for(values):
                return None
            step.valid_values = values
        return step

    def renew(self, specialization: Specialization, flat: FlatBatch) -> None:
        """Captures the optimizer's step again, for the hyperparameters as they are now."""
        with self._lock:
            self._builder.renew(specialization, flat)

    def judge(
        self, specialization: Specialization, step: PreparedStep, checked: CheckedStep
    ) -> None:
        """Whether a step that was checked may be replayed from now on.

        Raises:
            CaptureError: it may not, and the job insists on capture.
        """
        if checked.difference is not None:
            if self._takes_back(specialization):
                return
            self._builder.note_wrong(specialization)
            self._opacity.give_up_step(
                "its captured step gives other numbers than the eager one: "
                f"{checked.difference} ({users_line(None, self._job.function)})"
            )
            return
        if checked.adopted:
            return
        moved = specialization.assumptions.difference()
        problem = None if moved else specialization.assumptions.narrow(checked.seen)
        if (moved or problem) and self._takes_back(specialization):
            return
        if moved is not None:
            self._kept.drop(specialization)
            problem = self._trials.count_move(moved)
        else:
            self._trials.note_seen(specialization.assumptions)
        if problem is not None or moved is not None:
            self._builder.note_wrong(specialization)
        if problem is not None:
            self._opacity.give_up_step(problem)
        elif moved is None:
            specialization.checked.add(step)
            self._builder.note_checked(specialization)

    def _takes_back(self, specialization: Specialization) -> bool:
        """Whether a capture that a check has found wrong, or doubtful, came from disk: the next
        one does not, and its own check counts."""
        if not self._builder.disk.takes_back(specialization):
            return False
        self._builder.note_wrong(specialization)
        self._kept.drop(specialization)
        return True

    def written(self) -> list[torch.Tensor]:
        """The tensors that some step writes to, or may: persistent ones, and constants of its own.

        What steps write that run eagerly, if only until they are captured, nobody has seen: all
        that is trained, and what modules that train keep in buffers. A step of the user's own may
        write to anything.
        """
        is_eager = self._opacity.step is not None or self._opacity.optimizer is not None
        steps = self.steps()
        if is_eager or (not steps and self._job.step is not None):
            return list(self._persistent.tensors.values())
        if not steps:
            return self._may_be_written()
        written: dict[int, torch.Tensor] = {}
        for step in steps:
            inputs = self._persistent.inputs_of(step)
            found = (inputs[meaning] for meaning in step.graph.mutated if meaning in inputs)
            written.update((id(tensor), tensor) for tensor in found)
        return list(written.values())

    def _may_be_written(self) -> list[torch.Tensor]:
        written = {id(p) for p in trained_parameters(self._job.optimizer) if p.requires_grad}
        for module in self._job.root.modules():
            if module.training:
                written.update(map(id, module.buffers(recurse=False)))
        held = self._persistent.tensors.items()
        return [t for meaning, t in held if meaning.kind == "state" or id(t) in written]

    def read(self) -> list[Account]:
        """All Python state that some step can read."""
        return [each.assumptions.account for each in self._kept.all()]

    def collect_persistent(self) -> None:
        """Collects the job's persistent tensors as they are now.

        Captures for other state tensors of the optimizer than there are now are dropped.
        """
        version = self._persistent.version
        is_other_state = self._persistent.collect()
        if self._persistent.version != version:
            self._over.clear()
        if is_other_state:
            if not self.is_empty:
                self.recaptures.note_dropped()
            self._kept.clear()
        self._persistent.note_size()

    def collect_for(self, specialization: Specialization) -> None:
        """Collects them where they were collected for another capture since this one was used: by
        the names that it knows them by they may be others, and be those of before again."""
        if specialization.collected != self._persistent.version:
            self.collect_persistent()
            specialization.collected = self._persistent.version

    def _is_over(self, first: PreparedStep) -> bool:
        """Whether all that a first step creates is there."""
        if first not in self._over:
            if not self._persistent.has_all(first.graph.outputs):
                return False
            self._over.add(first)
        return True

    def _capture(self, flat: FlatBatch) -> Specialization:
        """Captures the step for such batches, as the user's Python is now."""
        former = self._kept.of(flat.signature)
        self.recaptures.count_dropped()
        self._wait_for_settled(flat.signature, former)
        self.questions.weigh(one.runs for one in self._kept.all() if one.forward.recording.answers)
        if former:
            self.recaptures.count_after(former[-1], self._builder.runs_to_pay(flat.signature))
        elif flat.signature not in self._kept and len(self._kept) >= MAX_SHAPES:
            raise self._too_many_shapes()
        self._kept.announce(flat.signature)
        self.collect_persistent()
        if not self._persistent.gradients_hold:
            raise capture_error(
                self._job.name,
                "gradients that the step leaves are sparse, or somebody else has them, or a tensor "
                "of their memory",
                users_line(None, self._job.function),
                UnsettledError,
            )
        specialization = self._builder.build(flat)
        if specialization.forward.reassigned and self._job.on_step is not None:
            raise capture_error(
                self._job.name,
                f"the step gives its buffer {specialization.forward.reassigned[0]!r} a new tensor, "
                "and a callback may hold the former one",
                users_line(None, self._job.function),
            )
        asked = [question for question, _ in specialization.forward.recording.answers]
        answering = self.questions.learn(flat, asked)
        specialization.collected = self._persistent.version
        self._kept.add(answering.signature, specialization)
        self.captures += 1
        return specialization

    def _wait_for_settled(self, signature: Hashable, former: list[Specialization]) -> None:
        """Raises `StillChangingError` where steps on such batches are better eager for now: none of
        the captures that have gone stale is looked at before each of them."""
        latest, runs_to_pay = next(reversed(former), None), self._builder.runs_to_pay(signature)
        try:
            self.recaptures.wait_for(signature, latest, runs_to_pay)
        except StillChangingError:
            for stale in former:
                self._kept.drop(stale)
            raise

    def _too_many_shapes(self) -> ManyShapesError:
        return ManyShapesError(
            f"job {self._job.name!r}: its batches have had {MAX_SHAPES} different shapes (or "
            "plain values) and each needs a capture of its own. Pad or bucket the batches, "
            "pass changing numbers as tensors, or give the job capture=False.",
            f"batches have had {MAX_SHAPES} different shapes before",
        )
