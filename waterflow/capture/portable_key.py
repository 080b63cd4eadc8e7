"""What a capture is kept under on disk: all that its traces depend on, equal in every process.

Within an engine, jobs share captures where their structures are equal (`steps.shared_captures`).
What is the same for all jobs of one process by itself (libraries, switches, patches, variables of
the environment) has to be told here, and objects that are there once have names in place of
addresses (`account.portable`). Where something cannot be told, there is no key.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import UninitializedParameter

from waterflow.account.patches import foreign_kernel, patched
from waterflow.account.portable import code_digest
from waterflow.capture.assumptions import Assumptions, JobStructure
from waterflow.capture.traced_floats import traceable
from waterflow.common.environment import flags, installation
from waterflow.job.batch import FlatBatch
from waterflow.job.epochs import MicroBatches
from waterflow.job.job import Job
from waterflow.job.optimizer_state import (
    Layout,
    hyperparameters,
    state_layout,
    trained_parameters,
)

#: Variables of the environment that torch and the libraries below it read.
_READ_BY_LIBRARIES = (
    *("TORCH", "PYTORCH", "ATEN", "C10", "MKL", "OMP", "GOMP", "KMP", "DNNL", "ONEDNN", "OPENBLAS"),
    *("CUDA", "NVIDIA", "HIP", "ROCR", "LANG", "LC_"),
)
#: Tensors that are not the model's count with what they hold, up to so many bytes.
_MOST_HELD = 16 << 20
_ATOMS = (type(None), bool, int, str, bytes)
_NAMED = (torch.dtype, torch.device)
_CONTAINERS = (list, tuple, dict, MicroBatches)


class NoKeyError(Exception):
    """Something that a capture depends on cannot be told to another process. Never a user's."""


@dataclass(frozen=True)
class PortableKey:
    """What a capture is kept under.

    Attributes:
        digest: equal for jobs of all processes whose steps are traced to the same.
        known: the structure in it, with the job's tensors by number.
    """

    digest: str
    known: JobStructure


def portable_sight(job: Job, flat: FlatBatch) -> str | None:
    """What is told at once of a job and its batch; None where there will be no key."""
    if job.step is not None or job.device.type != "cpu":
        return None
    parameters = [*map(_layout, job.root.parameters())]
    kinds = type(job.root).__qualname__, type(job.optimizer).__qualname__
    try:
        return _digest(["sight", kinds, parameters, job.rules, _signature(flat.signature)])
    except NoKeyError:
        return None


def portable_key(job: Job, assumptions: Assumptions, flat: FlatBatch) -> PortableKey | None:
    """What a capture of a job's step is kept under; None where nothing is.

    Args:
        job: the job.
        assumptions: what its traces take for granted.
        flat: a batch for the step.
    """
    known = assumptions.structure(portable=True)
    if known is None or known.structure.portable is None:
        return None
    try:
        parts = [
            *("capture", installation(), flags(), _libraries(), _Plain(known.key[1:]).text),
            *(known.structure.portable, _seen(assumptions), job.modules is None),
            *(_signature(flat.signature), _optimizer(job), _held(job, known)),
        ]
    except (NoKeyError, OSError):
        return None
    return PortableKey(_digest(parts), known)


def _digest(parts: Iterable[Any]) -> str:
    return hashlib.sha256(repr(list(parts)).encode("utf-8", "surrogatepass")).hexdigest()


def _layout(parameter: torch.Tensor) -> Hashable:
    shape = None if isinstance(parameter, UninitializedParameter) else tuple(parameter.shape)
    return shape, parameter.dtype, parameter.requires_grad


def _libraries() -> Any:
    """What is the same for all jobs of a process, and may not be in another."""
    patch = patched()
    if patch is not None:
        raise NoKeyError(f"{patch} is not torch's own")
    kernel = foreign_kernel()
    if kernel is not None:
        raise NoKeyError(f"a kernel of somebody's own for {kernel}")
    variables = sorted(name for name in os.environ if name.startswith(_READ_BY_LIBRARIES))
    values = [(name, os.environ[name]) for name in variables]
    return values, torch.get_num_threads(), torch._C._get_sdp_priority_order()


def _seen(assumptions: Assumptions) -> Any:
    """Which attributes and functions counted."""
    names, seen = assumptions.names, assumptions.seen
    codes = None if seen is None else sorted(map(code_digest, seen.codes))
    return None if names is None else sorted(names), codes


def _optimizer(job: Job) -> Any:
    """Its state, and the hyperparameters that are no live numbers."""
    values = {
        key: "live" if traceable(value) else _Plain(value).text
        for key, value in hyperparameters(job.optimizer).items()
    }
    return values, [_Plain(list(entries.items())).text for entries in state_layout(job.optimizer)]


def _signature(signature: Any) -> str:
    return _Plain(signature).text


class _Plain:
    """A text for plain values, and containers and layouts of such.

    Raises:
        NoKeyError: of another value, or a type that is not known by its name.
    """

    def __init__(self, value: Any) -> None:
        self.text = repr(self._of(value))

    def _of(self, value: Any) -> Any:
        kind: Any = type(value)
        if kind in _ATOMS or kind in _NAMED or kind in (float, complex):
            return kind.__name__, repr(value)
        if kind is Layout:
            return repr(value)
        if isinstance(value, tuple) or kind is list:  # rules and sizes, too
            return (kind.__name__, *map(self._of, value))
        if value in (*_CONTAINERS, *_ATOMS, *_NAMED, float, complex):
            return value.__qualname__
        raise NoKeyError(f"a value of {kind}")


def _held(job: Job, known: JobStructure) -> list[Any]:
    """What tensors hold that are neither the model's nor trained: code may have made something of
    their values."""
    own = {id(tensor) for tensor in (*job.root.parameters(), *job.root.buffers())}
    own |= {id(tensor) for tensor in trained_parameters(job.optimizer)}
    found, size = [], 0
    for number, tensor in known.structure.tensors.items():
        if id(tensor) in own:
            continue
        size += tensor.nbytes
        if size > _MOST_HELD or tensor.device.type != "cpu":
            raise NoKeyError("large tensors beside the model's")
        held = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
        found.append((number, hashlib.sha256(held.tobytes()).hexdigest()))
    return found
