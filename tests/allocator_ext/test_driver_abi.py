"""core/device/driver.h against the real cuda.h, where a toolkit or its pip package is installed."""

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.fake_cuda import COMPILER, EXTENSION, ROOT

pytestmark = pytest.mark.virtual

SOURCES = [ROOT / "tests" / "fakecuda" / "abi.cpp", EXTENSION / "core" / "device" / "driver.cpp"]


def header_folders() -> list[Path]:
    """Folders with cuda.h: a toolkit's before those of pip's packages, newer ones first."""
    toolkits = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    folders = [Path(toolkit) / "include" for toolkit in toolkits if toolkit]
    packages = importlib.util.find_spec("nvidia")
    for package in (packages and packages.submodule_search_locations) or []:
        folders += sorted(Path(package).glob("*/include"), reverse=True)
    return [folder for folder in folders if (folder / "cuda.h").is_file()]


def test_driver_agrees_with_cuda_h(tmp_path: Path) -> None:
    if shutil.which(COMPILER[0]) is None:
        pytest.skip(f"no compiler {COMPILER[0]}")
    if not (headers := header_folders()):
        pytest.skip("no cuda.h: install a CUDA toolkit or the package nvidia-cuda-runtime")
    program = tmp_path / "abi"
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror"]
    includes = [f"-I{EXTENSION}", "-isystem", str(headers[0])]
    command = [*COMPILER, *flags, *includes, *map(str, SOURCES), "-ldl", "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([program], capture_output=True, text=True, timeout=250)
    assert done.stdout == "abi: ok\n", done.stdout
