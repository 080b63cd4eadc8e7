"""Checkpoints of a run in a folder: each job's tensors in one file, the rest in another.

    FOLDER/run.json                       the names of the run's jobs
    FOLDER/JOB/checkpoint.json            all but the tensors; names their file
    FOLDER/JOB/STEPS-RANDOM.safetensors   the tensors

A file of tensors is written under a new name and made durable; then `checkpoint.json` takes the
place of the former one in one rename; then the former tensors go. So whenever the process, the
disk's space or the machine ends, the folder holds the former checkpoint or the new one, whole.
Nothing is ever unpickled, and both files carry a SHA-256.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from waterflow.checkpoint.safetensor_file import read_tensors, write_tensors
from waterflow.checkpoint.snapshot import JobSnapshot
from waterflow.common.errors import CheckpointError
from waterflow.common.file_lock import locked
from waterflow.common.files import sync_folder, write_atomically

VERSION = 1
_FORMAT = "waterflow checkpoint"
_PLAIN_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_STATES = ("running", "finished", "stopped")


class CheckpointFolder:
    """The checkpoints of one run; one process at a time writes to it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises CheckpointError where that is no path of a folder."""
        if not os.fspath(path):
            raise CheckpointError(
                "the folder of checkpoints is an empty text: name one, or give None"
            )
        self.path = Path(path)

    def __str__(self) -> str:
        return str(self.path)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CheckpointFolder) and self.path.resolve() == other.path.resolve()

    def __hash__(self) -> int:
        return hash(self.path.resolve())

    @property
    def exists(self) -> bool:
        """Whether a run has been begun there."""
        try:
            return (self.path / "run.json").exists()
        except (OSError, ValueError):  # no path that there could be
            return False

    @contextlib.contextmanager
    def opened(self, jobs: Iterable[str]) -> Iterator[None]:
        """Inside, this process alone writes there; the jobs are entered in its list.

        Raises:
            CheckpointError: another process does, or the folder cannot be written to.
        """
        with contextlib.ExitStack() as inside:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                inside.enter_context(locked(self.path / "lock"))
                known = self.jobs() if self.exists else []
                if new := [name for name in jobs if name not in known]:
                    write_atomically(self.path / "run.json", _sealed({"jobs": [*known, *new]}))
                    sync_folder(self.path)
            except BlockingIOError:
                raise CheckpointError(
                    f"another process writes checkpoints to {self}: wait for its end, or give "
                    "checkpoint= another folder"
                ) from None
            except (OSError, ValueError) as error:  # a path of 0 bytes, among others
                raise CheckpointError(
                    f"cannot write checkpoints to {self}: {error}. Give checkpoint= another folder"
                ) from error
            yield

    def jobs(self) -> list[str]:
        """The names of the run's jobs, of those without a checkpoint, too.

        Raises:
            CheckpointError: there is no run, or its list is damaged or of another version.
        """
        return [str(name) for name in _opened(self.path / "run.json")["jobs"]]

    def write(self, snapshot: JobSnapshot) -> int:
        """Makes a snapshot the job's checkpoint, durably; returns its bytes on disk.

        Raises:
            OSError: it cannot be written; the former checkpoint is still there.
        """
        folder = self.path / folder_name(snapshot.job)
        if not folder.is_dir():
            folder.mkdir(parents=True)
            sync_folder(self.path)
        tensors = folder / f"{snapshot.steps}-{secrets.token_hex(6)}.safetensors"
        try:
            digest, size = write_tensors(tensors, snapshot.tensors)
            fields = {
                **snapshot.fields,  # of one that was read these four, too, of the former file
                "job": snapshot.job,
                "state": snapshot.state,
                "tensors": {"file": tensors.name, "sha256": digest, "bytes": size},
                "torch": str(torch.__version__),
            }
            content = _sealed(fields)
            write_atomically(folder / "checkpoint.json", content)
        except BaseException:
            tensors.unlink(missing_ok=True)
            raise
        sync_folder(folder)
        _remove_others(folder, tensors.name)
        return size + len(content)

    def read(self, job: str) -> JobSnapshot | None:
        """The job's checkpoint, None where it has none.

        Raises:
            CheckpointError: it is damaged, or of another version; names the file.
        """
        path = self.path / folder_name(job) / "checkpoint.json"
        if not path.exists():
            return None
        fields = _opened(path, job)
        kept = fields["tensors"]
        if fields["job"] != job:
            raise CheckpointError(f"job {job!r}: {path} is the checkpoint of {fields['job']!r}")
        if fields["state"] not in _STATES:
            raise _damaged(path, job, f"its state is {fields['state']!r}")
        file = path.with_name(Path(kept["file"]).name)
        try:
            tensors = read_tensors(file, kept["sha256"], kept["bytes"])
        except FileNotFoundError:
            raise _damaged(path, job, f"its file {file.name} is missing") from None
        except ValueError as error:
            raise _damaged(file, job, str(error)) from error
        return JobSnapshot(job, fields["state"], fields, tensors)


def folder_name(job: str) -> str:
    """The folder of a job's checkpoint: its name, or what is left of it with a digest."""
    if _PLAIN_NAME.fullmatch(job):
        return job
    digest = hashlib.sha256(job.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    plain = re.sub(r"[^a-z0-9]+", "-", job.lower()).strip("-")[:50]
    return f"{plain}.{digest}"


def _remove_others(folder: Path, kept: str) -> None:
    """Removes tensors of former checkpoints, and what killed processes have left."""
    for path in folder.iterdir():
        if path.suffix in (".safetensors", ".part") and path.name != kept:
            with contextlib.suppress(OSError):
                path.unlink()


def _dumped(fields: Any) -> bytes:
    return json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()


def _sealed(fields: dict[str, Any]) -> bytes:
    """The fields with format, version and checksum."""
    digest = hashlib.sha256(_dumped(fields)).hexdigest()
    return _dumped({"format": _FORMAT, "version": VERSION, "sha256": digest, "fields": fields})


def _opened(path: Path, job: str | None = None) -> dict[str, Any]:
    """The fields of a file that `_sealed` has made.

    Raises:
        CheckpointError: there is none, or it is damaged or of another version.
    """
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(
            f"there is no checkpoint at {path.parent}: {path.name} is missing. Give resume= the "
            "folder that checkpoint= was given"
        ) from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path, job, f"it is no JSON: {error}") from error
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise _damaged(path, job, "it is no checkpoint of waterflow's")
    if found.get("version") != VERSION:
        raise CheckpointError(
            f"{_of(job)}{path} is of version {found.get('version')!r}, this waterflow reads "
            f"version {VERSION}: resume with the waterflow that wrote it, or begin without resume"
        )
    fields = found.get("fields")
    if hashlib.sha256(_dumped(fields)).hexdigest() != found.get("sha256"):
        raise _damaged(path, job, "its checksum is wrong")
    assert isinstance(fields, dict)
    return fields


def _of(job: str | None) -> str:
    return "" if job is None else f"job {job!r}: "


def _damaged(path: Path, job: str | None, what: str) -> CheckpointError:
    return CheckpointError(
        f"{_of(job)}{path} is damaged: {what}. Put a copy in its place, or begin without resume"
    )
