"""Who may include whom in the extension, and that nothing of the tests is shipped with it."""

import re
import runpy
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import setuptools

from tests.support.programs import EXTENSION, ROOT

pytestmark = pytest.mark.virtual

#: Whose headers the files of a folder may include, beside those of the folder itself. `bind` is the
#: only one that nothing includes; where the extension is built without CUDA, `bind` leaves out what
#: it includes of `cuda`.
MAY_INCLUDE = {
    "core/arena": (),
    "core/device": ("core/arena",),
    "core/plan": ("core/arena",),
    "core/check": ("core/arena",),
    "runtime": ("core/arena", "core/device", "core/plan"),
    "cuda": ("core/arena", "core/device", "runtime"),
    "account": (),
    "bind": ("account", "core/arena", "core/check", "core/device", "core/plan", "cuda", "runtime"),
}
#: Beside these a header in angle brackets is the compiler's or the system's.
PYTHON = ("Python.h", "frameobject.h", "structmember.h", "pybind11/")
TORCH = ("ATen/", "c10/", "torch/")
SYSTEM = re.compile(r"[a-z_]+|[a-z_]+\.h|sys/[a-z_]+\.h")
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"\n]+)[>"]', re.MULTILINE)


def violations(extension: Path) -> list[str]:
    files = sorted([*extension.rglob("*.cpp"), *extension.rglob("*.h")])
    return [f"{path.relative_to(extension)}: {w}" for path in files for w in wrong(path, extension)]


def wrong(path: Path, extension: Path) -> Iterable[str]:
    """What is wrong with the includes of one file."""
    folder = path.relative_to(extension).parent.as_posix()
    if folder not in MAY_INCLUDE:
        yield f"{folder} has no rule"
        return
    for bracket, name in INCLUDE.findall(path.read_text()):
        if bracket == "<":
            foreign = name.startswith(PYTHON + TORCH)
            if foreign and folder.startswith("core/"):
                yield f"the core includes <{name}>"
            elif not foreign and not SYSTEM.fullmatch(name):
                yield f"<{name}> is neither the system's nor Python's nor torch's"
        elif not (extension / name).is_file():
            yield f'"{name}" is no file of the extension'
        else:
            other = Path(name).parent.as_posix()
            if other != folder and other not in MAY_INCLUDE[folder]:
                yield f"{folder} includes {other} ({name})"


def test_includes_go_in_one_direction() -> None:
    assert violations(EXTENSION) == []


def test_the_rules_have_no_circle() -> None:
    met: list[str] = []

    def visit(folder: str, way: tuple[str, ...] = ()) -> None:
        assert folder not in way, f"{folder} is on its own way: {way}"
        for other in MAY_INCLUDE[folder]:
            visit(other, (*way, folder))
        met.append(folder)

    for folder in MAY_INCLUDE:
        visit(folder)
    assert set(met) == {path.parent.relative_to(EXTENSION).as_posix() for path in sources()}


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        ("core/arena/arena.h", "#include <torch/extension.h>", "the core includes <torch"),
        ("core/plan/gate.cpp", "#  include <Python.h>", "the core includes <Python.h>"),
        ("core/plan/pile.h", '#include "core/device/cuda_device.h"', "core/plan includes core/dev"),
        ("core/arena/allocator.h", '#include "core/plan/pile.h"', "core/arena includes core/plan"),
        ("core/check/checker.cpp", '#include "core/plan/gate.h"', "core/check includes core/plan"),
        ("runtime/lane.cpp", '#include "bind/core.h"', "runtime includes bind"),
        ("runtime/tape.h", '#include "cuda/cuda_lanes.h"', "runtime includes cuda"),
        ("bind/core.cpp", '#include "../tests/allocator_ext/drive.h"', "is no file of the ext"),
        ("bind/core.cpp", "#include <gtest/gtest.h>", "<gtest/gtest.h> is neither"),
        ("core/drive.cpp", "", "core has no rule"),
    ],
)
def test_a_wrong_include_is_found(tmp_path: Path, file: str, line: str, complaint: str) -> None:
    copy = tmp_path / "allocator_ext"
    shutil.copytree(EXTENSION, copy, ignore=shutil.ignore_patterns("*.so"))
    path = copy / file
    path.write_text((path.read_text() if path.exists() else "") + line + "\n")
    (found,) = violations(copy)
    assert found.startswith(f"{file}: ")
    assert complaint in found


def sources() -> list[Path]:
    """What is compiled into the extension where there is CUDA."""
    return sorted(EXTENSION.rglob("*.cpp"))


def test_only_the_extensions_folder_is_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sources as setup.py collects them; those of `cuda` only where torch has CUDA."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **options: given.update(options))
    runpy.run_path(str(ROOT / "setup.py"))
    (extension,) = given["ext_modules"]
    cuda = EXTENSION / "cuda"
    with_cuda = "WATERFLOW_WITH_CUDA" in dict(extension.define_macros)
    expected = [path for path in sources() if with_cuda or path.parent != cuda]
    assert [ROOT / source for source in extension.sources] == expected
    assert extension.include_dirs[0] == str(EXTENSION)
    others = map(Path, extension.include_dirs[1:])
    assert not any(folder.is_relative_to(ROOT / "tests") for folder in others)
