"""What is prepared of a job: its steps, what serves batches of one signature, batches to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from waterflow.capture.assumptions import Assumptions
from waterflow.capture.forward import ForwardTrace
from waterflow.capture.optimizer import OptimizerTrace
from waterflow.executor.data.staging import PinnedBatch
from waterflow.executor.plan.piled_step import Piles
from waterflow.executor.plan.spilled_step import SpilledStep
from waterflow.executor.plan.step_memory import StepMemory
from waterflow.executor.run.tape import CompiledStep
from waterflow.job.batch import FlatBatch
from waterflow.job.optimizer_state import HyperKey
from waterflow.partitioner.graph.step_graph import StepGraph
from waterflow.report.step_loss import with_metrics


@dataclass(eq=False)
class PreparedStep:
    """A step graph of a job, compiled and profiled.

    Attributes:
        graph: the step graph.
        compiled: its tape.
        optimizer: the optimizer's trace in it, None where the optimizer runs eagerly.
        memory: its profile, ready for planning.
        piles: the step piled up, where it flows.
        planned_from: what it was before it was planned into a memory limit (`spilling`); None
            where it was not.
        spill: the plan by which its values are spilled, None where none are.
    """

    graph: StepGraph
    compiled: CompiledStep
    optimizer: OptimizerTrace | None
    memory: StepMemory = field(init=False)
    piles: Piles = field(init=False)
    valid_values: Mapping[HyperKey, Any] | None = None  # hyperparameters last found valid
    planned_from: PreparedStep | None = None
    spill: SpilledStep | None = None

    @property
    def as_captured(self) -> PreparedStep:
        """The step as it was before it was planned into this job's limit."""
        return self if self.planned_from is None else self.planned_from

    @property
    def creates_state(self) -> bool:
        """Whether it is a first step, which makes the optimizer's state."""
        return bool(self.optimizer is not None and self.graph.outputs)


def losses_of(steps: Sequence[PreparedStep], result: Any) -> Sequence[float]:
    """The losses of steps that a lane has made, with what the steps have told beside them.

    Args:
        steps: the steps.
        result: the extension's `RoundResult`, with a loss for each.
    """
    losses: Sequence[float] = result.losses()
    if not any(step.graph.metrics for step in steps):
        return losses
    each = zip(steps, losses, result.metrics(), strict=True)
    return [with_metrics(loss, step.graph.metrics, numbers) for step, loss, numbers in each]


@dataclass(eq=False)
class Specialization:
    """All that is prepared for batches of one signature, while what it assumes holds.

    Attributes:
        forward: the traced forward and backward pass.
        assumptions: what the captures have taken for granted.
        first: the step that creates the optimizer's state, None where it is there already.
        steady: every later step.
        checked: steps that an eager step has confirmed.
        runs: how many steps were made of it so far.
        collected: the version of the job's tensors, by their names, with which it was right last.
        outgrown: whether another capture for such batches has been counted since.
        offer: the same to other jobs (`shared_captures`), until all that can be learnt of who may
            have it is learnt; None where nobody may.
    """

    forward: ForwardTrace
    assumptions: Assumptions
    first: PreparedStep | None = None
    steady: PreparedStep | None = None
    checked: set[PreparedStep] = field(default_factory=set)
    runs: int = 0
    collected: int = -1
    outgrown: bool = False
    offer: Any = None

    @property
    def steps(self) -> list[PreparedStep]:
        """Its first and its steady step, as far as they are there."""
        return [step for step in (self.first, self.steady) if step]


@dataclass(eq=False)
class PreparedBatch:
    """A batch with what can run it.

    Attributes:
        batch: as the data yielded it.
        flat: the same, taken apart; None where nobody could, or had to.
        specialization: what runs it; None where the whole step runs eagerly.
        pinned: there for a batch that has yet to be brought to the device.
        trial: whether this eager step has to show if later ones may be traced.
    """

    batch: Any
    flat: FlatBatch | None = None
    specialization: Specialization | None = None
    pinned: PinnedBatch | None = None
    trial: bool = False

    @property
    def is_plainly_eager(self) -> bool:
        """Whether its step is the user's own Python, and nothing is to be learnt from it."""
        return self.specialization is None and not self.trial


@dataclass
class CheckedStep:
    """A step that was made eagerly, and what was learnt of its graph.

    Attributes:
        loss: the eager step's loss.
        difference: where the graph's numbers are not the eager ones; None if they are equal.
        varies: whether that is where no loop repeats its bits, so that it may be chance.
        seen: the Python code and the C functions that the eager step has called.
        adopted: whether there was no memory for the eager step, so that the graph's numbers count.
    """

    loss: float
    difference: str | None
    seen: Any
    adopted: bool = False
    varies: bool = False
