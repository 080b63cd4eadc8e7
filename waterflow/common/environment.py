"""What a captured step depends on beside the job itself: versions, source files, torch's flags."""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import platform
import site
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

from waterflow.common import switches

#: Parts of this package whose files are all part of a key: they make the graphs and follow them.
_OWN_PACKAGES = ("waterflow", "waterflow.partitioner", "waterflow.executor")
#: Part of this package, but as good as the user's: code that is captured.
_CAPTURED_PACKAGE = "waterflow.models"


@functools.cache
def _library_folders() -> tuple[str, ...]:
    """Where installed packages and the standard library are, each with a separator at its end."""
    found = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    found |= {*site.getsitepackages(), site.getusersitepackages()}
    found.add(str(Path(torch.__file__).parent))
    return tuple(os.path.join(os.path.realpath(folder), "") for folder in found)


@functools.cache
def is_library_file(filename: str) -> bool:
    """Whether a file belongs to the standard library or to an installed package."""
    return filename.startswith("<frozen") or os.path.realpath(filename).startswith(
        _library_folders()
    )


def is_library(module_name: str) -> bool:
    """Whether a module's code is known by a version, and not by its text.

    This package is: all of its files are part of a key. Its models are not.
    """
    package = module_name.partition(".")[0]
    if package == "waterflow":
        return not (module_name + ".").startswith(_CAPTURED_PACKAGE + ".")
    module = sys.modules.get(module_name)
    if module is None or module_name == "__main__":
        return False
    filename = getattr(module, "__file__", None)
    if module_name in sys.builtin_module_names or filename is None:
        return True  # without a file: built in, or a folder of other modules
    if not os.path.isabs(filename) and package != module_name:
        return is_library(package)  # "torch.classes" is made by its package
    return is_library_file(filename)


def environment(gpu: bool = False) -> str:
    """A text that changes with everything around the job that may change its step graph.

    Args:
        gpu: whether it trains on a GPU; looking at one costs time and its memory.

    Raises:
        OSError: a loaded module's source file cannot be read.
    """
    parts = [*_versions(), *(_gpus() if gpu else ()), *_flags(), *_installed()]
    parts += [f"{name} {_digest(path)}" for name, path in sorted(_sources())]
    return "\n".join(parts)


@functools.cache
def installation() -> str:
    """A digest that changes with the versions and the installed packages, and with this one."""
    parts = [*_versions(), *_installed(), *_own_files()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def flags() -> list[str]:
    """Process-wide and thread-wide switches, as texts that are equal for equal ones."""
    return list(_flags())


def _own_files() -> list[str]:
    """Files of this package, its extensions included, as their sizes and dates tell them."""
    found = []
    for package in map(importlib.import_module, (*_OWN_PACKAGES, "waterflow.allocator_ext")):
        folder = Path(str(package.__file__)).parent
        for path in (*folder.rglob("*.py"), *folder.rglob("*.so")):
            status = path.stat()
            name = path.relative_to(folder)
            found.append(f"{package.__name__} {name} {status.st_size} {status.st_mtime_ns}")
    return sorted(set(found))


def _versions() -> Iterator[str]:
    yield f"python {sys.version} {platform.machine()} {sys.flags.optimize}"
    yield f"torch {torch.__version__} {torch.version.git_version} {torch.version.cuda}"
    yield f"host {torch.backends.cpu.get_cpu_capability()}"


def _gpus() -> Iterator[str]:
    for index in range(torch.cuda.device_count()):
        yield f"gpu {torch.cuda.get_device_name(index)} {torch.backends.cudnn.version()}"


def _flags() -> Iterator[str]:
    """Process-wide and thread-wide switches that change which operators a step is made of."""
    yield f"process {switches.now()} {torch.get_default_device()}"
    yield f"modes {torch.is_grad_enabled()} {torch.is_inference_mode_enabled()}"
    for device in ("cpu", "cuda"):
        state = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        yield f"autocast {device} {state} {torch.is_autocast_cache_enabled()}"
    yield f"nnpack {torch.backends.nnpack.is_available()}"


def _installed() -> list[str]:
    """Installed distributions with their versions, as their folders name them, and their dates.

    All of them: what a package computes depends on the packages that it uses.
    """
    found: set[str] = set()
    for folder in _library_folders():
        try:
            entries = list(os.scandir(folder))
        except OSError:
            continue
        for entry in entries:
            if entry.name.endswith((".dist-info", ".egg-info")):
                found.add(f"{entry.name} {entry.stat().st_mtime_ns}")
    return sorted(found)


def _sources() -> Iterator[tuple[str, Path]]:
    """Files of this package, and of every loaded module that no version stands for."""
    for package in map(importlib.import_module, _OWN_PACKAGES):
        folder = Path(str(package.__file__)).parent
        for path in folder.rglob("*.py"):
            name = f"{package.__name__}/{path.relative_to(folder)}"
            if not name.startswith(_CAPTURED_PACKAGE.replace(".", "/") + "/"):
                yield name, path
    for name, module in list(sys.modules.items()):
        filename = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
        typed_in = name == "__main__" and str(filename).startswith("<")
        if isinstance(filename, str) and not typed_in and not is_library(name):
            yield name, Path(filename)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
