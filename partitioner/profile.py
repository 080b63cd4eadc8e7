"""What one training step of a job does to memory, node by node.

A profile is the only thing that partition and policies know about a job: a list of allocations
and frees in execution order, the time of each node, and the bytes that the job holds all the
time. It is a value: read-only, checked when made, and saved to a file so that a second run does
not measure again.
"""

from __future__ import annotations

import copy
import io
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from waterflow.common.files import write_atomically

EVENT: np.dtype[np.void] = np.dtype([("node", "<i4"), ("bytes", "<i8"), ("id", "<i4")])
"""One event: while ``node`` runs, block ``id`` is allocated (bytes > 0) or freed (bytes < 0)."""

ASSUMED_NODE_SECONDS = 10e-6
"""Time of a node when nothing was measured: about one small kernel and its launch."""

SOURCES = ("fake", "measured")
FORMAT_VERSION = 1

EventArray = npt.NDArray[np.void]
IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Profile:
    """Memory and time of one training step of one job (Waterwave, section 4.4: profiling).

    ``events`` has dtype ``EVENT``; its nodes never decrease. Block ids count up from 0 in the
    order of allocation and each block is freed at most once, with the bytes it was allocated
    with. A block that is never freed survives the step: state that the first step creates.
    ``node_seconds`` holds one entry per node, zeros when unknown. ``persistent_bytes`` are the
    parameters, buffers and optimizer state, held all the time. ``source`` says where the numbers
    come from: ``"fake"`` tensors or ``"measured"`` on the device.

    Raises ValueError where any of that does not hold.
    """

    events: EventArray
    node_seconds: FloatArray
    persistent_bytes: int
    source: str = "fake"
    name: str = ""

    def __post_init__(self) -> None:
        events = np.array(self.events)
        seconds = np.array(self.node_seconds, dtype=np.float64)
        _check_header(self.name, seconds, self.persistent_bytes, self.source)
        _check_events(self.name, events, len(seconds))
        events.flags.writeable = False
        seconds.flags.writeable = False
        object.__setattr__(self, "events", events)
        object.__setattr__(self, "node_seconds", seconds)
        object.__setattr__(self, "persistent_bytes", int(self.persistent_bytes))

    def beside(self, *, name: str | None = None, persistent_bytes: int | None = None) -> Profile:
        """The same step of a job of that name, or beside other persistent bytes: what has been
        checked of it, and worked out, is not again."""
        twin = copy.copy(self)
        if name is not None:
            object.__setattr__(twin, "name", name)
        if persistent_bytes is not None:
            _check_persistent(twin.name, persistent_bytes)
            object.__setattr__(twin, "persistent_bytes", int(persistent_bytes))
        return twin

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the step, those without events included."""
        return len(self.node_seconds)

    @cached_property
    def seconds(self) -> float:
        """Time of the whole step run alone; 0.0 when unknown."""
        return float(self.node_seconds.sum())

    def curve(self) -> IntArray:
        """Transient bytes live after each event (read-only, one entry per event)."""
        return self._curve

    @property
    def transient_peak_bytes(self) -> int:
        """The most that the step holds at once beyond its persistent bytes."""
        return int(self._curve.max(initial=0))

    @property
    def solo_peak_bytes(self) -> int:
        """The most that the job holds at once when it runs alone."""
        return self.persistent_bytes + self.transient_peak_bytes

    @property
    def surviving_bytes(self) -> int:
        """Transient bytes still live after the last node."""
        return int(self._curve[-1]) if len(self._curve) else 0

    @property
    def peak_node(self) -> int:
        """The node during which the transient peak is first reached; 0 without events."""
        return int(self.events["node"][np.argmax(self._curve)]) if len(self._curve) else 0

    def node_live(self) -> IntArray:
        """Transient bytes live before each node, and after the last: one entry more than nodes."""
        return self._node_live

    def node_high(self) -> IntArray:
        """The highest transient bytes during each node, its start included."""
        return self._node_high

    def node_net(self) -> IntArray:
        """Bytes allocated less bytes freed by each node."""
        return np.diff(self._node_live)

    def to_npz(self, path: str | os.PathLike[str]) -> None:
        """Write the profile to ``path``, whole or not at all."""
        write_atomically(Path(path), self.to_bytes())

    def to_bytes(self) -> bytes:
        """What ``to_npz`` writes."""
        header = {
            "version": FORMAT_VERSION,
            "name": self.name,
            "source": self.source,
            "persistent_bytes": self.persistent_bytes,
        }
        content = io.BytesIO()
        np.savez_compressed(
            content,
            header=np.array(json.dumps(header)),
            events=self.events,
            node_seconds=self.node_seconds,
        )
        return content.getvalue()

    @classmethod
    def from_npz(cls, path: str | os.PathLike[str]) -> Profile:
        """Read what ``to_npz`` wrote; ValueError when the content is not a whole, valid profile.

        A file that cannot be read at all raises OSError as usual.
        """
        data = Path(path).read_bytes()
        try:
            return cls.from_bytes(data)
        except Exception as error:
            # A damaged archive fails in zipfile, zlib, struct, numpy or json, each with errors of
            # its own; a cache wants to know one thing: measure again.
            raise ValueError(
                f"{os.fspath(path)} does not hold a valid profile ({error}); delete it to measure "
                "again"
            ) from error

    @classmethod
    def from_bytes(cls, data: bytes) -> Profile:
        """What ``to_bytes`` made; damaged data raise errors of any kind."""
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            header: dict[str, Any] = json.loads(str(arrays["header"][()]))
            if header["version"] != FORMAT_VERSION:
                raise ValueError(f"format version {header['version']}, expected {FORMAT_VERSION}")
            return cls(
                events=arrays["events"],
                node_seconds=arrays["node_seconds"],
                persistent_bytes=header["persistent_bytes"],
                source=header["source"],
                name=header["name"],
            )

    @cached_property
    def _curve(self) -> IntArray:
        return _read_only(np.cumsum(self.events["bytes"], dtype=np.int64))

    @cached_property
    def _node_live(self) -> IntArray:
        events_before = np.searchsorted(self.events["node"], np.arange(self.num_nodes + 1))
        return _read_only(np.concatenate(([0], self._curve))[events_before])

    @cached_property
    def _node_high(self) -> IntArray:
        high = self._node_live[:-1].copy()
        touched, first = np.unique(self.events["node"], return_index=True)
        if len(touched):
            inside = np.maximum.reduceat(self._curve, first)
            high[touched] = np.maximum(high[touched], inside)
        return _read_only(high)


def node_times(profiles: Sequence[Profile]) -> list[FloatArray]:
    """Seconds of each node of each profile, comparable between the profiles.

    When the time of any of them is unknown, node counts stand for time in all of them
    (``ASSUMED_NODE_SECONDS`` a node): measured times of one job beside guesses for another would
    make a schedule look balanced that is not.
    """
    if all(profile.seconds > 0 for profile in profiles):
        return [profile.node_seconds for profile in profiles]
    return [np.full(profile.num_nodes, ASSUMED_NODE_SECONDS) for profile in profiles]


def _read_only(array: IntArray) -> IntArray:
    array.flags.writeable = False
    return array


def _check_header(name: str, seconds: FloatArray, persistent_bytes: int, source: str) -> None:
    if seconds.ndim != 1 or len(seconds) == 0:
        raise ValueError(
            f"profile {name!r}: node_seconds must be a vector with an entry for every node of at "
            f"least one, its shape is {seconds.shape}"
        )
    if not np.isfinite(seconds).all() or (seconds < 0).any():
        raise ValueError(f"profile {name!r}: node_seconds must be finite and not negative")
    _check_persistent(name, persistent_bytes)
    if source not in SOURCES:
        raise ValueError(f"profile {name!r}: source is {source!r}, expected one of {SOURCES}")


def _check_persistent(name: str, persistent_bytes: int) -> None:
    if isinstance(persistent_bytes, bool) or not isinstance(persistent_bytes, (int, np.integer)):
        raise ValueError(f"profile {name!r}: persistent_bytes is {persistent_bytes!r}, not an int")
    if persistent_bytes < 0:
        raise ValueError(f"profile {name!r}: persistent_bytes is {persistent_bytes}, below 0")


def _check_events(name: str, events: EventArray, num_nodes: int) -> None:
    if events.ndim != 1 or events.dtype != EVENT:
        raise ValueError(
            f"profile {name!r}: events must be a vector of dtype EVENT, they have shape "
            f"{events.shape} and dtype {events.dtype}"
        )
    nodes, sizes, ids = events["node"], events["bytes"], events["id"]
    if len(nodes) == 0:
        return
    if (np.diff(nodes) < 0).any() or nodes[0] < 0 or nodes[-1] >= num_nodes:
        raise ValueError(
            f"profile {name!r}: the events' nodes must not decrease and lie in 0..{num_nodes - 1}"
        )
    if (sizes == 0).any():
        at = int(np.argmax(sizes == 0))
        raise ValueError(f"profile {name!r}: event {at} has 0 bytes; leave empty blocks out")
    allocated = np.flatnonzero(sizes > 0)
    if not np.array_equal(ids[allocated], np.arange(len(allocated))):
        raise ValueError(
            f"profile {name!r}: block ids must count up from 0 in the order of allocation"
        )
    _check_frees(name, events, allocated)


def _check_frees(name: str, events: EventArray, allocated: npt.NDArray[np.intp]) -> None:
    """``allocated[i]`` is the event that allocates block i."""
    freed = np.flatnonzero(events["bytes"] < 0)
    ids = events["id"][freed]
    unknown = ids[(ids < 0) | (ids >= len(allocated))]
    if len(unknown):
        raise ValueError(f"profile {name!r}: block {unknown[0]} is freed but never allocated")
    twice = np.flatnonzero(np.bincount(ids, minlength=1) > 1)
    if len(twice):
        raise ValueError(f"profile {name!r}: block {twice[0]} is freed more than once")
    if (allocated[ids] > freed).any():
        block = ids[allocated[ids] > freed]
        raise ValueError(f"profile {name!r}: block {block[0]} is freed before it is allocated")
    other = events["bytes"][allocated[ids]] != -events["bytes"][freed]
    if other.any():
        raise ValueError(
            f"profile {name!r}: block {ids[other][0]} is freed with other bytes than allocated"
        )
