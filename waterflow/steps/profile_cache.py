"""Profiles of steps on disk, where a step that was measured once need not be again."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from waterflow.common.files import cache_directory
from waterflow.executor.device.base import Device
from waterflow.partitioner.graph.step_graph import StepGraph
from waterflow.partitioner.profile import Profile

#: Of tapes: another one where the same graph asks for other memory than before.
_FORM = "2"


def profile_path(graph: StepGraph, threads: int, device: Device) -> Path:
    """Profiles depend on the graph, on torch and its kernels, and on the number of threads."""
    parts = (graph.fingerprint(), torch.__version__, device.identity, str(threads), _FORM)
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return cache_directory() / "profiles" / f"{digest}.npz"


def read_profile(path: Path) -> Profile | None:
    """The profile that is kept there; None where there is none, or a damaged one."""
    try:
        return Profile.from_npz(path)
    except (OSError, ValueError):
        return None  # it is measured again


def write_profile(path: Path, profile: Profile) -> None:
    """Keeps a profile there, if the folder can be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        profile.to_npz(path)
    except OSError:
        pass  # a cache that cannot be written costs time, nothing else
