"""The C++ programs of the tests: an object file is compiled once for all that link it."""

from __future__ import annotations

import functools
import hashlib
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
_ALLOCATOR = EXTENSION / "core" / "arena" / "allocator.cpp"
_PAPERS_KEYING = (
    "return one_lane ? __builtin_ctzll(users) : kNoLane;",
    "static_cast<void>(one_lane);\n  return record.lane;",
)
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


@functools.cache
def changed(source: Path, kind: Kind, old: str, new: str) -> Task[Path]:
    """The object file of a copy of the source with one place changed: to show what it is for."""

    def work(_: None) -> Path:
        text = source.read_text()
        assert text.count(old) == 1, f"{source} has {old!r} {text.count(old)} times"
        name = f"{source.stem}-{hashlib.sha256((old + new).encode()).hexdigest()[:8]}-{kind.name}"
        copy, target = folder() / f"{name}.cpp", folder() / f"{name}.o"
        copy.write_text(text.replace(old, new))
        succeed(*kind.command, "-c", copy, "-o", target)
        return target

    return Task(f"changed {source.name}", work, [_runtime(kind)])


def objects(sources: Sequence[Path], kind: Kind) -> list[Task[Path]]:
    return [compiled(source, kind) for source in sources]


def objects_with_the_papers_keying(sources: Sequence[Path], kind: Kind) -> list[Task[Path]]:
    """With the rule of Waterwave (section 4.2 b) of who may take a freed chunk before a
    sync: the lane that allocated it. It races once a job's groups move between lanes."""
    others = [source for source in sources if source != _ALLOCATOR]
    assert len(others) == len(sources) - 1
    return [changed(_ALLOCATOR, kind, *_PAPERS_KEYING), *objects(others, kind)]


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
