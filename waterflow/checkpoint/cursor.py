"""Where a job is in its data: streams at each epoch's beginning, and the way back to a batch.

An iterator cannot be kept. So a job that goes on begins its epoch anew, with the random streams as
they were when the epoch began; the batches whose steps are done are drawn and dropped, and then the
streams are set to where they stood after the last of these steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from waterflow.checkpoint.streams import Streams, generators_of
from waterflow.checkpoint.values import Json, Packer, Unpacker
from waterflow.common.errors import CheckpointError, JobError
from waterflow.executor.run.rng import JobRng
from waterflow.job.epochs import NumberedEpochs
from waterflow.job.job import Job

_NOTHING = object()


@dataclass(frozen=True)
class Position:
    """Where a job stands between two steps.

    Attributes:
        steps: done, of all epochs.
        epoch: which it is in (0, 1, ...).
        batches: of this epoch whose steps are done.
        latest_loss: of the last step; NaN before the first.
        now: the streams after that step, with no batch fetched ahead.
        at_epoch: the streams when this epoch's data were begun.
        data_at_epoch: the data's own state then, where it has a ``state_dict``; else None.
        length: the batches of an epoch, where the data has a length.
    """

    steps: int
    epoch: int
    batches: int
    latest_loss: float
    now: Streams
    at_epoch: Streams
    data_at_epoch: Any = None
    length: int | None = None

    def pack(self, packer: Packer) -> Json:
        """The position as JSON."""
        return {
            "steps": self.steps,
            "epoch": self.epoch,
            "batches": self.batches,
            "latest_loss": packer.pack(self.latest_loss, "latest_loss"),
            "now": self.now.pack(packer, "streams"),
            "at_epoch": self.at_epoch.pack(packer, "streams at the epoch's beginning"),
            "data_at_epoch": packer.pack(self.data_at_epoch, "data.state_dict()"),
            "length": self.length,
        }

    @classmethod
    def unpack(cls, packed: Json, unpacker: Unpacker) -> Position:
        """The position that `pack` has packed."""
        return cls(
            steps=packed["steps"],
            epoch=packed["epoch"],
            batches=packed["batches"],
            latest_loss=unpacker.unpack(packed["latest_loss"]),
            now=Streams.unpack(packed["now"], unpacker),
            at_epoch=Streams.unpack(packed["at_epoch"], unpacker),
            data_at_epoch=unpacker.unpack(packed["data_at_epoch"]),
            length=packed["length"],
        )


class DataCursor:
    """Begins the epochs of one job's data, on the thread that fetches them."""

    def __init__(
        self,
        job: Job,
        rng: JobRng,
        begin: Callable[[Iterable[Any], int], Iterator[Any]],
        resumed: Position | None = None,
    ) -> None:
        """Args beyond the obvious.

        begin: begins an epoch, from the data and its number.
        resumed: where the job goes on.
        """
        self._job = job
        self._rng = rng
        self._begin = begin
        self._resumed = resumed
        self._generators = generators_of(job)
        self._at_epoch: tuple[Streams, Any] | None = None

    def begin(self, data: Iterable[Any], epoch: int) -> Iterator[Any]:
        """Begins an epoch, the first one of a job that goes on where that left off. In the job's
        context.

        Raises:
            CheckpointError: the data has fewer batches than the job has made steps of.
            Whatever the data raises.
        """
        position, self._resumed = self._resumed, None
        if position is None:
            self._at_epoch = self._streams(), _state_of(data)
            return self._begin(data, epoch)
        self._at_epoch = position.at_epoch, position.data_at_epoch
        if position.data_at_epoch is not None:
            data.load_state_dict(position.data_at_epoch)  # type: ignore[attr-defined]
        position.at_epoch.put_back(self._rng, self._generators)
        iterator = self._begin(data, epoch)
        for done in range(position.batches):
            if next(iterator, _NOTHING) is _NOTHING:
                raise CheckpointError(
                    f"job {self._job.name!r}: its data has {done} batches in epoch {epoch}, of "
                    f"which its checkpoint has made {position.batches} steps: give the job the "
                    "data that it was trained on"
                )
        position.now.put_back(self._rng, self._generators)
        return iterator

    def position(self, steps: int, epoch: int, batches: int, latest_loss: float) -> Position:
        """Where the job stands now; no batch may have been fetched ahead."""
        now = self._streams()
        at_epoch, data = self._at_epoch or (now, None)
        length = self._job.length
        return Position(steps, epoch, batches, latest_loss, now, at_epoch, data, length)

    def _streams(self) -> Streams:
        return Streams.of(self._rng, self._generators)


def _state_of(data: Any) -> Any:
    """The state that data keeps of itself, as it tells it; None where it does not."""
    if hasattr(data, "state_dict") and hasattr(data, "load_state_dict"):
        return data.state_dict()
    return None


def check_can_be_positioned(job: Job) -> None:
    """Refuses data that cannot be begun anew.

    Raises:
        JobError: it is a one-shot iterator, or its worker processes outlive an epoch.
    """
    data = job.data
    if isinstance(data, Iterator) and not isinstance(data, NumberedEpochs):
        raise JobError(
            f"job {job.name!r}: its data is a {type(data).__name__}, which can be iterated once "
            "only, so no checkpoint could find its place in it again: pass a list, a DataLoader, "
            "or an object whose __iter__ begins anew"
        )
    if isinstance(data, DataLoader) and data.persistent_workers:
        raise JobError(
            f"job {job.name!r}: its DataLoader has persistent_workers=True, whose random streams "
            "live in other processes and would be lost: make it without, to take checkpoints"
        )
