"""A whole job between two steps: taken, compared with a job, given to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from waterflow.checkpoint import model, optimizer
from waterflow.checkpoint.cursor import Position
from waterflow.checkpoint.snapshot import JobSnapshot
from waterflow.checkpoint.values import DamagedValueError, NotExpressibleError, Packer, Unpacker
from waterflow.common.errors import CheckpointError, ReportError
from waterflow.job.job import Job
from waterflow.report.evaluation import Evaluation
from waterflow.report.json_fields import Fields
from waterflow.report.step_loss import with_metrics

RUNNING = "running"


@dataclass(frozen=True)
class Progress:
    """What of a job is not in the user's own objects.

    Attributes:
        seed: of its torch streams.
        position: where it stands.
        losses: of all steps, one each.
        metrics: of all steps, by name.
        epochs: passes over the data that are behind it.
        state: "running", "finished" or "stopped".
        evaluations: what `Job.evaluate` has found.
        epoch_ends: how many steps had been made at the end of each of these passes.
    """

    seed: int | None
    position: Position
    losses: Sequence[float]
    epochs: int
    state: str = RUNNING
    metrics: Mapping[str, Sequence[float]] = field(default_factory=dict)
    evaluations: Sequence[Evaluation] = ()
    epoch_ends: Sequence[int] = ()

    @property
    def latest_loss(self) -> float:
        """The loss of its last step, with the metrics of that."""
        numbers = [values[-1] for values in self.metrics.values()]
        return with_metrics(self.position.latest_loss, [*self.metrics], numbers)


def take(job: Job, progress: Progress, before: model.Attributes) -> JobSnapshot:
    """A snapshot of the job as it is now; nothing of it changes with the job.

    Args:
        job: between two steps, its tensors anywhere.
        progress: the rest of it.
        before: the plain attributes of its model when it was submitted (`model.attributes_of`).

    Raises:
        CheckpointError: it holds something that JSON and tensors cannot; names the field.
    """
    packer = Packer()
    try:
        fields = {
            "seed": progress.seed,
            "state": progress.state,
            "epochs": progress.epochs,
            "epoch_ends": list(progress.epoch_ends),
            "planned": {"epochs": job.epochs, "steps": job.steps},
            "evaluations": [evaluation.to_dict() for evaluation in progress.evaluations],
            "losses": packer.tensor(torch.tensor(progress.losses, dtype=torch.float64), "losses"),
            "metrics": {
                name: packer.tensor(torch.tensor(values, dtype=torch.float64), f"metric {name}")
                for name, values in progress.metrics.items()
            },
            "position": progress.position.pack(packer),
            "model": model.pack_model(job.root, before, packer),
            "gradients": model.pack_gradients(job, packer),
            "optimizer": optimizer.pack_optimizer(job, packer),
            "scheduler": optimizer.pack_scheduler(job, packer),
        }
    except NotExpressibleError as error:
        raise CheckpointError(
            f"job {job.name!r}: {error} cannot be kept in a checkpoint, which holds tensors, "
            "numbers, texts and containers of them. Keep it elsewhere, or give its owner a "
            "state_dict and a load_state_dict that leave it out"
        ) from error
    return JobSnapshot(job.name, progress.state, fields, packer.copies())


def check(job: Job, snapshot: JobSnapshot) -> None:
    """Looks whether the snapshot is of this job; changes nothing.

    Raises:
        CheckpointError: it is not; names the job, all that differs, and the remedy.
    """
    problems = list(_misfits(job, snapshot))
    if problems:
        shown = "; ".join(problems[:4])
        more = f"; and {len(problems) - 4} more differences" if len(problems) > 4 else ""
        raise CheckpointError(
            f"job {job.name!r}: its checkpoint is of another job: {shown}{more}. Build the job as "
            "it was, or begin without resume"
        )


def _misfits(job: Job, snapshot: JobSnapshot) -> Iterator[str]:
    fields, unpacker = snapshot.fields, _unpacker(job, snapshot)
    yield from model.misfits(job.root, fields["model"], unpacker)
    yield from optimizer.misfits(job, fields["optimizer"])
    yield from optimizer.scheduler_misfits(job, fields["scheduler"])
    here, there = job.length, fields["position"]["length"]
    if here is not None and there is not None and here != there:
        yield f"the data has {here} batches an epoch, the checkpoint's had {there}"
    if job.seed not in (None, fields["seed"]):
        yield f"it has seed={job.seed}, the checkpoint's had {fields['seed']}, which goes on"
    yield from _end_misfits(job, snapshot)


def _end_misfits(job: Job, snapshot: JobSnapshot) -> Iterator[str]:
    """Whether the end that the job has now lies behind it."""
    planned, position = snapshot.fields["planned"], snapshot.fields["position"]
    now = {"epochs": job.epochs, "steps": job.steps}
    if now == planned:
        return
    if snapshot.state == "finished":
        yield f"it has finished with {_ends(planned)} and is to have {_ends(now)}"
    elif snapshot.state == RUNNING:
        late = job.steps is not None and job.steps <= position["steps"]
        if late or (job.epochs is not None and job.epochs <= position["epoch"]):
            yield (
                f"it has made {position['steps']} steps, in epoch {position['epoch']}, and is to "
                f"have {_ends(now)}"
            )


def _ends(planned: dict[str, int | None]) -> str:
    named = [f"{key}={value}" for key, value in planned.items() if value is not None]
    return ", ".join(named)


def put(job: Job, snapshot: JobSnapshot) -> Progress:
    """Gives the job's objects the snapshot's state, in their own tensors; returns the rest.

    Args:
        job: which the snapshot is of (`check`).
        snapshot: the snapshot.

    Raises:
        CheckpointError: the snapshot's fields do not fit together.
    """
    fields, unpacker = snapshot.fields, _unpacker(job, snapshot)
    try:
        model.unpack_model(job.root, fields["model"], unpacker)
        optimizer.unpack_scheduler(job, fields["scheduler"], unpacker)
        optimizer.unpack_optimizer(job, fields["optimizer"], unpacker)
        model.unpack_gradients(job, fields.get("gradients", {}), unpacker)
        return Progress(
            seed=fields["seed"],
            position=Position.unpack(fields["position"], unpacker),
            losses=unpacker.view(fields["losses"]).tolist(),
            epochs=fields["epochs"],
            state=snapshot.state,
            metrics={
                name: unpacker.view(kept).tolist()
                for name, kept in fields.get("metrics", {}).items()
            },
            evaluations=[
                Evaluation.from_fields(Fields(found, "evaluations."))
                for found in fields.get("evaluations", [])  # checkpoints of old have none
            ],
            epoch_ends=fields.get("epoch_ends", []),
        )
    except (
        DamagedValueError,
        ReportError,
        LookupError,
        TypeError,
        ValueError,
        RuntimeError,
    ) as error:
        raise CheckpointError(
            f"job {job.name!r}: its checkpoint cannot be given to it, {error!r}. It was made by "
            "other code: build the job as it was, or begin without resume"
        ) from error


def _unpacker(job: Job, snapshot: JobSnapshot) -> Unpacker:
    return Unpacker(snapshot.tensors, job.device)
