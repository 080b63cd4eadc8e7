"""How much memory this process can have at all: the machine's, or less where a group limits it."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_CGROUPS = Path("/sys/fs/cgroup")


class MemoryLimit(NamedTuple):
    """Bytes that this process can have at most, and what says so."""

    size: int
    source: str


def machine_memory() -> int:
    """Bytes of memory that the machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def memory_limit(cgroups: Path = _CGROUPS, own: Path = Path("/proc/self/cgroup")) -> MemoryLimit:
    """The smallest of the machine's memory and the limits of the groups that the process is in.

    Args:
        cgroups: where the kernel shows control groups, version 2 or 1.
        own: the file that tells the groups of this process.
    """
    limits = [MemoryLimit(machine_memory(), "this machine has")]
    limits += [MemoryLimit(size, "this container may have") for size in _group_limits(cgroups, own)]
    return min(limits)


def _group_limits(cgroups: Path, own: Path) -> list[int]:
    found = []
    for line in _read(own).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            found += _limits_above(cgroups, path, "memory.max")
        elif "memory" in controllers.split(","):
            found += _limits_above(cgroups / "memory", path, "memory.limit_in_bytes")
    return found


def _limits_above(root: Path, path: str, name: str) -> list[int]:
    """The limits of a group and of those that it is in; inside a container the path may be one of
    outside, of which only the root is there."""
    folder = PurePosixPath("/", path).relative_to("/")
    texts = [_read(root / part / name).strip() for part in (folder, *folder.parents)]
    return [int(text) for text in texts if text.isdigit()]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
