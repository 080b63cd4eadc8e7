"""Replays an allocation log against several allocators, in a small library of its own (C++)."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import subprocess
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

ROOT = Path(__file__).parents[1]
SOURCE = Path(__file__).with_suffix(".cpp")
EXTENSION = ROOT / "allocator_ext"
TORCH = Path(torch.__file__).parent
#: Beside those of the extension; of torch the library is needed that has its CPU allocator.
FLAGS = (
    *("-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-ldl"),
    *(f"-I{EXTENSION}", f"-I{TORCH / 'include'}", f"-L{TORCH / 'lib'}", "-lc10"),
)


def build() -> Path:
    """Compiles the library with what it needs of the allocator's core, optimized like that.

    Its name has the hash of its sources, so an old one is never taken.
    """
    parts = (EXTENSION / "core" / name for name in ("arena", "device"))
    sources = [SOURCE, *(path for part in parts for path in sorted(part.glob("*.cpp")))]
    headers = sorted((EXTENSION / "core").rglob("*.h"))
    digest = hashlib.sha256(torch.__version__.encode())
    for path in (*sources, *headers):
        digest.update(path.read_bytes())
    built = ROOT / "build" / "benchmarks" / f"libreplay-{digest.hexdigest()[:16]}.so"
    if not built.exists():
        built.parent.mkdir(parents=True, exist_ok=True)
        unfinished = built.with_suffix(f".{os.getpid()}")
        compiler = shlex.split(os.environ.get("CXX", "c++"))
        command = [*compiler, "-O3", *map(str, sources), *FLAGS, "-o", str(unfinished)]
        subprocess.run(command, check=True)
        unfinished.replace(built)
    return built


class Replay:
    """The loaded library."""

    def __init__(self, library: Path | None = None) -> None:
        """The library is built where none is given."""
        self._replay = ctypes.CDLL(str(library or build())).waterflow_replay
        self._replay.restype = ctypes.c_double

    def __call__(
        self, sizes: npt.ArrayLike, ids: npt.ArrayLike, allocator: str, repeats: int
    ) -> float:
        """Nanoseconds per allocate and its free.

        Args:
            sizes: bytes of a step's events; below zero they free.
            ids: the block of each event.
            allocator: ``arena`` (best fit), ``planned`` (at the places of a plan), ``malloc`` or
                ``torch``.
            repeats: how often the step is replayed.
        """
        events = np.ascontiguousarray(sizes, np.int64), np.ascontiguousarray(ids, np.int32)
        if events[0].shape != events[1].shape or not events[0].size:
            raise ValueError("a log needs events, and one id for each")
        pointers = (array.ctypes.data_as(ctypes.c_void_p) for array in events)
        count = ctypes.c_size_t(events[0].size)
        nanoseconds = float(self._replay(*pointers, count, allocator.encode(), repeats))
        if nanoseconds < 0:
            raise ValueError(f"no allocator named {allocator!r}")
        return nanoseconds
