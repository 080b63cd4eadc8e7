"""The core under ASan, UBSan and TSan: a C++ driver with threads as lanes, built and run here."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.virtual

ROOT = Path(__file__).parents[2]
EXTENSION = ROOT / "allocator_ext"
COMPILER = os.environ.get("CXX", "g++")


def compile_driver(sanitizers: str, sources: list[Path], output: Path) -> None:
    flags = ["-std=c++17", "-O1", "-g1", "-pthread", f"-fsanitize={sanitizers}"]
    checks = ["-fno-sanitize-recover=all", "-D_GLIBCXX_ASSERTIONS", "-Wall", "-Wextra", "-Werror"]
    command = [COMPILER, *flags, *checks, f"-I{EXTENSION}", *map(str, sources), "-o", str(output)]
    subprocess.run(command, check=True, capture_output=True, text=True)


def require_runtime(sanitizers: str, folder: Path) -> None:
    """Skips where the compiler is missing or has no runtime for these sanitizers."""
    if shutil.which(COMPILER) is None:
        pytest.skip(f"no compiler {COMPILER}")
    probe = folder / "probe.cpp"
    probe.write_text("int main() {}\n")
    try:
        compile_driver(sanitizers, [probe], folder / "probe")
        subprocess.run([folder / "probe"], check=True, capture_output=True)
    except subprocess.CalledProcessError:
        pytest.skip(f"{COMPILER} has no runtime for {sanitizers}")


@pytest.mark.slow
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_stress_is_clean(sanitizers: str, tmp_path: Path) -> None:
    require_runtime(sanitizers, tmp_path)
    sources = [*sorted((EXTENSION / "core").glob("*.cpp")), Path(__file__).with_name("stress.cpp")]
    try:
        compile_driver(sanitizers, sources, tmp_path / "stress")
    except subprocess.CalledProcessError as error:
        pytest.fail(error.stderr)
    done = subprocess.run([tmp_path / "stress"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "stress: ok\n"
