"""Captures on disk: what a step does to memory, by the identity of the job and its factory.

A file that is damaged, or of another format, is as good as none. Sizes are kept in bytes that are
not rounded, so one file serves arenas of every alignment.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from waterflow.capture.fake_job import BuiltJob
from waterflow.capture.fingerprint import Fingerprint
from waterflow.common.cache import distrust_cached, read_cached, write_cached
from waterflow.common.environment import environment
from waterflow.executor.profile.fake import StepWalk
from waterflow.study.footprint import RawFootprint

#: Changes with the format of the files.
_VERSION = 1
#: Of the cache.
_FOLDER = "families"

_Arrays = dict[str, npt.NDArray[Any]]


def key_of(make: Callable[..., Any], built: BuiltJob, kind: str, key: str | None) -> str | None:
    """What a capture is kept under; None where something it depends on cannot be seen.

    Args:
        make: the factory.
        built: the job that it made.
        kind: what is kept.
        key: stands for what cannot be seen, if the caller knows it.
    """
    job = built.job
    identity = Fingerprint()
    try:
        identity.add("kind", (kind, _VERSION, key))
        identity.add("factory", make)
        identity.add("training", (job.root, job.optimizer, job.function, tuple(job.rules)))
        identity.add("data", (job.data, built.batch.signature))
        identity.add_patches()
        if identity.doubts and key is None:
            return None
        identity.add("environment", environment(gpu=job.device.type == "cuda"))
    except Exception:  # objects may refuse to be looked at in any way, files to be read
        return None
    return identity.digest()


def load(key: str | None) -> tuple[RawFootprint, _Arrays] | None:
    """The footprint kept under a key and the arrays kept with it; None where there is none."""
    if key is None:
        return None
    content = read_cached(_FOLDER, f"{key}.npz")
    if content is None:
        return None
    try:
        return _unpack(content)
    except Exception as error:  # damaged in one of the many ways of an archive
        distrust_cached(_FOLDER, f"{key}.npz", error)
        return None


def store(key: str | None, footprint: RawFootprint, **also: npt.NDArray[Any]) -> None:
    """Keeps a footprint and some arrays with it; without a key, or a place to write, nothing."""
    if key is not None:
        write_cached(_FOLDER, f"{key}.npz", _pack(footprint, also))


def _pack(footprint: RawFootprint, also: _Arrays) -> bytes:
    header: dict[str, Any] = {"version": _VERSION, "also": sorted(also)}
    arrays: _Arrays = {"persistent": footprint.persistent}
    arrays.update({f"also_{name}": array for name, array in also.items()})
    for name, walk in (("first", footprint.first), ("steady", footprint.steady)):
        if walk is not None:
            header[name] = {"operators": walk.operators, "boundary": walk.boundary}
            arrays.update({f"{name}_{field}": getattr(walk, field) for field in _FIELDS})
    file = io.BytesIO()
    np.savez_compressed(file, header=np.array(json.dumps(header)), **arrays)  # type: ignore[arg-type]
    return file.getvalue()


#: Arrays of a walk, and their types.
_FIELDS: dict[str, Any] = {
    "event_nodes": np.int32,
    "event_blocks": np.int32,
    "allocates": np.bool_,
    "sizes": np.int64,
    "flops": np.int64,
    "moved_bytes": np.int64,
}


def _unpack(content: bytes) -> tuple[RawFootprint, _Arrays]:
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        header = json.loads(str(arrays["header"][()]))
        if header["version"] != _VERSION:
            raise ValueError("another format")
        walks = {
            name: _walk(name, header[name], arrays)
            for name in ("first", "steady")
            if name in header
        }
        footprint = RawFootprint(walks.get("first"), walks["steady"], arrays["persistent"])
        also = {name: arrays[f"also_{name}"] for name in header["also"]}
    footprint.at(1, "")  # raises where its parts do not fit together
    return footprint, also


def _walk(name: str, header: dict[str, Any], arrays: Any) -> StepWalk:
    found = {field: arrays[f"{name}_{field}"] for field in _FIELDS}
    if any(found[field].dtype != kind for field, kind in _FIELDS.items()):
        raise ValueError("an array of another type")
    return StepWalk(tuple(header["operators"]), header["boundary"], **found)
