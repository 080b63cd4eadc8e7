"""Profiles of steps on disk, where a step that was measured once need not be again."""

from __future__ import annotations

import hashlib

import torch

from waterflow.common.cache import cached_names, distrust_cached, read_cached, write_cached
from waterflow.executor.device.base import Device
from waterflow.job.batch import FlatBatch, is_skewed
from waterflow.partitioner.graph.step_graph import StepGraph
from waterflow.partitioner.profile import Profile

#: Of the cache.
_FOLDER = "profiles"
#: Of tapes: another one where the same graph asks for other memory than before.
_FORM = "2"
#: What took less to measure is not kept: of a small step the name alone takes a third of that, and
#: trials of ever other sizes would leave thousands of files.
LEAST_SECONDS = 0.1


def any_profiles() -> bool:
    """Whether any are kept."""
    return bool(cached_names(_FOLDER))


def profile_name(graph: StepGraph, threads: int, device: Device, flat: FlatBatch) -> str:
    """Profiles depend on the graph, on torch and its kernels, on the number of threads, and on how
    the batch is aligned."""
    tensors = [] if device.queues else flat.tensors  # which are packed for a device
    skewed = "".join(str(int(is_skewed(tensor))) for tensor in tensors)
    parts = (graph.fingerprint(), torch.__version__, device.identity, str(threads), skewed, _FORM)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest() + ".npz"


def read_profile(name: str, nodes: int) -> Profile | None:
    """The profile of so many nodes that is kept; None where there is none, or a damaged one."""
    content = read_cached(_FOLDER, name)
    if content is None:
        return None
    try:
        found = Profile.from_bytes(content)
        if found.num_nodes != nodes:
            raise ValueError(f"{found.num_nodes} nodes for a step of {nodes}")
    except Exception as error:  # damaged in one of the many ways of an archive
        distrust_cached(_FOLDER, name, error)
        return None
    return found


def write_profile(name: str, profile: Profile) -> None:
    """Keeps a profile, where that can be done."""
    write_cached(_FOLDER, name, profile.to_bytes())
