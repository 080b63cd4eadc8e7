"""The C++ programs of the tests: an object file is compiled once for all that link it."""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.tasks import Task, call, folder

ROOT = Path(__file__).parents[2]
EXTENSION = ROOT / "allocator_ext"
CORE = sorted((EXTENSION / "core").rglob("*.cpp"))
COMPILER = shlex.split(os.environ.get("CXX", "c++"))
WARNINGS = ["-Wall", "-Wextra", "-Werror"]

Done = subprocess.CompletedProcess[str]


@dataclass(frozen=True)
class Kind:
    """A way to compile: the flags, and the sanitizers among them."""

    name: str
    flags: tuple[str, ...]
    sanitizers: str = ""

    @property
    def command(self) -> list[str]:
        sanitize = ["-fno-sanitize-recover=all", f"-fsanitize={self.sanitizers}"]
        return [*COMPILER, *self.flags, *WARNINGS, *(sanitize if self.sanitizers else [])]


_FLAGS = ("-std=c++17", "-g1", "-pthread", "-D_GLIBCXX_ASSERTIONS", f"-I{EXTENSION}")

#: For programs and libraries.
PLAIN = Kind("plain", (*_FLAGS, "-O1", "-fPIC", "-fvisibility=hidden"))
#: Not optimized: of the checks of undefined behavior, most of the time went into optimizing them.
ADDRESS = Kind("address,undefined", (*_FLAGS, "-O0"), "address,undefined")
THREAD = Kind("thread", (*_FLAGS, "-O1"), "thread")


def require_compiler() -> None:
    """Skips where there is none."""
    if shutil.which(COMPILER[0]) is None:
        pytest.skip(f"no compiler {COMPILER[0]}")


def succeed(*command: object) -> None:
    """Fails with what the command said if it fails."""
    done = call(*command)
    assert done.returncode == 0, f"{' '.join(done.args)}\n{done.stdout}{done.stderr}"


@functools.cache
def _runtime(kind: Kind) -> Task[None]:
    """Skips where there is no compiler, or it has no runtime for the sanitizers."""

    def probe() -> None:
        require_compiler()
        source = folder() / f"probe-{kind.name}.cpp"
        source.write_text("int main() {}\n")
        program = source.with_suffix("")
        if call(*kind.command, source, "-o", program).returncode or call(program).returncode:
            pytest.skip(f"{COMPILER[0]} has no runtime for {kind.sanitizers}")

    return Task(f"probe {kind.name}", probe if kind.sanitizers else require_compiler)


@functools.cache
def compiled(source: Path, kind: Kind) -> Task[Path]:
    """The object file of a source."""

    def work(_: None) -> Path:
        target = folder() / f"{source.stem}-{kind.name}.o"
        succeed(*kind.command, "-c", source, "-o", target)
        return target

    return Task(source.name, work, [_runtime(kind)])


def objects(sources: Sequence[Path], kind: Kind) -> list[Task[Path]]:
    return [compiled(source, kind) for source in sources]


def linked(name: str, kind: Kind, parts: Sequence[Task[Path]], *flags: str) -> Task[Path]:
    """The program, or with the flag for it the library, of these object files."""

    def work(*files: Path) -> Path:
        target = folder() / f"{name}-{kind.name}"
        succeed(*kind.command, *files, *flags, "-o", target)
        return target

    return Task(f"{name} {kind.name}", work, parts)


def ended(*words: object) -> Task[Done]:
    """A command, run to its end. Tasks among its words stand for what they make."""

    def work(*made: object) -> Done:
        left = iter(made)
        return call(*(next(left) if isinstance(word, Task) else word for word in words))

    return Task(" ".join(map(str, words)), work, [word for word in words if isinstance(word, Task)])
