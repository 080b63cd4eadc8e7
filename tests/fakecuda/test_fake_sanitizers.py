"""The fake driver under ASan, UBSan and TSan: their reports on the core must be about the core."""

import subprocess
from pathlib import Path

import pytest
from case_fakecuda import COMPILER, EXTENSION, SOURCES, WARNINGS, library

pytestmark = pytest.mark.virtual


def compile_program(sanitizers: str, sources: list[Path], output: Path) -> str | None:
    """The compiler's complaint, if it has one."""
    flags = ["-std=c++17", "-O1", "-g1", "-pthread", f"-I{EXTENSION}", f"-fsanitize={sanitizers}"]
    checks = ["-fno-sanitize-recover=all", "-D_GLIBCXX_ASSERTIONS", *WARNINGS]
    command = [*COMPILER, *flags, *checks, *map(str, sources), "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stderr if done.returncode else None


def require_runtime(sanitizers: str, folder: Path) -> None:
    probe = folder / "probe.cpp"
    probe.write_text("int main() {}\n")
    runs = compile_program(sanitizers, [probe], folder / "probe") is None
    if not runs or subprocess.run([folder / "probe"], capture_output=True).returncode != 0:
        pytest.skip(f"{COMPILER[0]} has no runtime for {sanitizers}")


@pytest.mark.slow
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_hammered_driver_is_clean(sanitizers: str, tmp_path: Path) -> None:
    library()  # skips where there is no compiler
    require_runtime(sanitizers, tmp_path)
    sources = [*SOURCES, Path(__file__).with_name("hammer.cpp")]
    complaint = compile_program(sanitizers, sources, tmp_path / "hammer")
    assert complaint is None, complaint
    done = subprocess.run([tmp_path / "hammer"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "hammer: ok\n"
