"""Captures on disk: a process that meets a step which an earlier one has captured reads its traces.

What is kept are the traces (`capture.graph_file`), under all that they depend on
(`capture.portable_key`), once each graph made of them has been compared with the eager step. What
is read is joined, compiled and compared before it trains as if it had just been traced. Whatever
is wrong with a file, the step is traced, and the file goes.
"""

from __future__ import annotations

import hashlib
import json
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from waterflow.account.purity import undisturbed
from waterflow.capture.assumptions import Assumptions
from waterflow.capture.graph_file import Traces, read, written
from waterflow.capture.graph_values import NotPlainError
from waterflow.capture.portable_key import PortableKey, portable_key, portable_sight
from waterflow.common.cache import (
    cached_names,
    distrust_cached,
    drop_cached,
    mark_used,
    read_cached,
    trim_cached,
    write_cached,
)
from waterflow.job.batch import FlatBatch
from waterflow.job.job import Job
from waterflow.job.optimizer_state import hyperparameters, state_layout
from waterflow.steps.prepared import Specialization

#: Of the cache.
_FOLDER = "captures"
_FORMAT = "waterflow capture 1"
#: Bytes of all that is kept, and of one file.
_MOST_KEPT, _MOST_WRITTEN = 256 << 20, 32 << 20
#: Traces that took less CPU time are not kept: the key alone takes a good part of that.
LEAST_SECONDS = 0.1


@dataclass(eq=False)
class KeptCapture:
    """The place of one capture in the cache.

    Attributes:
        name: of its file.
        key: what it is kept under.
        traces: what is in the file, or will be.
        is_read: whether it is there.
    """

    name: str
    key: PortableKey
    traces: Traces
    is_read: bool


@dataclass(eq=False)
class CaptureCache:
    """The captures of one job on disk.

    Attributes:
        job: the job.
        is_on: whether it has any.
    """

    job: Job
    is_on: bool = False
    _kept: weakref.WeakKeyDictionary[Specialization, KeptCapture] = field(
        default_factory=weakref.WeakKeyDictionary, init=False
    )
    _read: KeptCapture | None = field(default=None, init=False)

    def traced(
        self, flat: FlatBatch, assumptions: Assumptions, trace: Callable[[], Traces | None]
    ) -> tuple[Traces | None, KeptCapture | None]:
        """The traces of a step, read where they are kept, and their place in the cache.

        Args:
            flat: a batch for it.
            assumptions: what it takes for granted.
            trace: makes them; None where the optimizer is not captured.
        """
        self._read = None
        sight = portable_sight(self.job, flat) if self.is_on else None
        if sight is None:
            return trace(), None
        found = self._found(sight[:16], flat, assumptions)
        if found is not None:
            return found.traces, found
        began = time.thread_time()
        traces = trace()
        if traces is None or time.thread_time() - began < LEAST_SECONDS:
            return traces, None
        key = portable_key(self.job, assumptions, flat)
        name = "" if key is None else _name(sight[:16], key)
        return traces, None if key is None else KeptCapture(name, key, traces, False)

    def note(self, specialization: Specialization, kept: KeptCapture | None) -> None:
        """A specialization was made of these traces."""
        self._read = None
        if kept is not None:
            self._kept[specialization] = kept

    def gives_up(self) -> bool:
        """What was read has turned out to be of no use, before anything was made of it.

        Returns:
            Whether anything was read.
        """
        found, self._read = self._read, None
        if found is not None:
            drop_cached(_FOLDER, found.name)
        return found is not None

    def note_checked(self, specialization: Specialization) -> None:
        """A check has passed; after the last one, the traces are kept."""
        if specialization.checked.issuperset(specialization.steps):
            kept = self._kept.pop(specialization, None)
            if kept is not None and not kept.is_read and self._is_as_kept(specialization, kept):
                _write(kept)

    def takes_back(self, specialization: Specialization) -> bool:
        """Whether a specialization that is not checked yet was read; its file is gone then."""
        kept = self._kept.get(specialization)
        if kept is None or not kept.is_read:
            return False
        self.note_wrong(specialization)
        return True

    def note_wrong(self, specialization: Specialization) -> None:
        """The step is not the eager one, or changes what it reads."""
        kept = self._kept.pop(specialization, None)
        if kept is not None:
            drop_cached(_FOLDER, kept.name)

    def _is_as_kept(self, specialization: Specialization, kept: KeptCapture) -> bool:
        """Whether what was checked is what was traced: hyperparameters may have outgrown it."""
        first, steady = kept.traces.first, kept.traces.steady
        known = [trace for trace in (first, steady) if trace is not None]
        steps = specialization.steps
        return len(steps) == len(known) and all(
            step.optimizer is trace for step, trace in zip(steps, known, strict=True)
        )

    def _found(self, sight: str, flat: FlatBatch, assumptions: Assumptions) -> KeptCapture | None:
        if not any(name.startswith(sight) for name in cached_names(_FOLDER)):
            return None
        key = portable_key(self.job, assumptions, flat)
        if key is None:
            return None
        name = _name(sight, key)
        content = read_cached(_FOLDER, name)
        if content is None:
            return None
        try:
            traces = read(_body(content, key), key.known.structure.tensors)
        except Exception as error:  # damaged in one of many ways, or of another torch
            distrust_cached(_FOLDER, name, error)
            return None
        if not self._fits(traces):
            return None
        mark_used(_FOLDER, name)
        self._read = KeptCapture(name, key, traces, True)
        return self._read

    def _fits(self, traces: Traces) -> bool:
        """Whether the optimizer's traces are right for its hyperparameters as they are."""
        values, state = hyperparameters(self.job.optimizer), state_layout(self.job.optimizer)
        for trace in (traces.first, traces.steady):
            if trace is not None:
                if trace.state_before != state or not trace.valid_for(values):
                    return False
                state = trace.state_after
        return True


def _name(sight: str, key: PortableKey) -> str:
    return f"{sight}-{key.digest[:40]}.json"


def _write(kept: KeptCapture) -> None:
    try:
        with undisturbed():  # thousands of lists, which all stay until they are written
            body = written(kept.traces, kept.key.known.structure.number_of)
    except NotPlainError:
        return
    if len(body) <= _MOST_WRITTEN:
        head = {"format": _FORMAT, "key": kept.key.digest, "sha256": _sum(body)}
        write_cached(_FOLDER, kept.name, json.dumps(head).encode() + b"\n" + body)
        trim_cached(_FOLDER, _MOST_KEPT)


def _body(content: bytes, key: PortableKey) -> bytes:
    """What a file holds beside its head.

    Raises:
        ValueError: it is not what was written under this key.
    """
    head, _, body = content.partition(b"\n")
    if json.loads(head) != {"format": _FORMAT, "key": key.digest, "sha256": _sum(body)}:
        raise ValueError("not what was written")
    return body


def _sum(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()
