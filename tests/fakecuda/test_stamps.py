"""The arena while work is queued: what a lane still reads is never handed out, as stamps show."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from case_fakecuda import COMPILER, EXTENSION, SOURCES, WARNINGS, library

pytestmark = pytest.mark.fakecuda

STAMPS = [*sorted((EXTENSION / "core").glob("*.cpp")), Path(__file__).with_name("stamps.cpp")]
FLAGS = ["-std=c++17", "-O1", "-g1", "-pthread", "-D_GLIBCXX_ASSERTIONS", f"-I{EXTENSION}"]
THREAD_SANITIZER = ["-fsanitize=thread"]


def call_compiler(*arguments: object) -> str:
    """The compiler's complaint, empty if it has none."""
    command = [*COMPILER, *FLAGS, *WARNINGS, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stderr if done.returncode else ""


def build(sources: list[Path], flags: list[str], folder: Path) -> Path:
    """The program, its sources compiled side by side."""
    objects = [folder / f"{number}.o" for number in range(len(sources))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        complaints = list(
            pool.map(
                lambda source, target: call_compiler(*flags, "-c", source, "-o", target),
                sources,
                objects,
            )
        )
    # The driver is part of the program under the sanitizer, which then finds it by its symbols.
    linked = call_compiler(*flags, *objects, "-rdynamic", "-ldl", "-o", folder / "stamps")
    assert "".join(complaints) + linked == ""
    return folder / "stamps"


def expect_ok(program: Path, driver: str, mode: str, seeds: int) -> None:
    command = [str(program), driver, mode, str(seeds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "stamps: ok\n"), done.stderr


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library()  # skips where there is no compiler
    return build(STAMPS, [], tmp_path_factory.mktemp("stamps"))


@pytest.mark.parametrize("mode", ["found", "planned"])
def test_no_stamp_is_lost(mode: str, program: Path) -> None:
    expect_ok(program, str(library()), mode, 36)


def test_stamps_are_lost_where_streams_do_not_wait(program: Path) -> None:
    """The tests above can fail."""
    expect_ok(program, str(library()), "unordered", 6)


def test_the_papers_keying_loses_a_stamp(program: Path) -> None:
    expect_ok(program, str(library()), "keying", 1)


@pytest.mark.slow
def test_stamps_under_the_thread_sanitizer(tmp_path: Path) -> None:
    library()
    probe = tmp_path / "probe.cpp"
    probe.write_text("int main() {}\n")
    refused = call_compiler(*THREAD_SANITIZER, probe, "-o", tmp_path / "probe")
    if refused or subprocess.run([tmp_path / "probe"], capture_output=True).returncode != 0:
        pytest.skip(f"{COMPILER[0]} has no runtime for the thread sanitizer")
    program = build([*STAMPS, *SOURCES], THREAD_SANITIZER, tmp_path)
    for mode in ("found", "planned", "keying"):
        expect_ok(program, "", mode, 6)
