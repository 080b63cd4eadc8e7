"""The arena while work is queued: what a lane still reads is never handed out, as stamps show."""

from pathlib import Path

import pytest

from tests.support.fake_cuda import LIBRARY, SOURCES
from tests.support.programs import (
    CORE,
    PLAIN,
    THREAD,
    Done,
    ended,
    linked,
    objects,
    objects_with_the_papers_keying,
)
from tests.support.tasks import Task, call

pytestmark = pytest.mark.fakecuda

STAMPS = [*CORE, Path(__file__).with_name("stamps.cpp")]
PROGRAM = linked("stamps", PLAIN, objects(STAMPS, PLAIN), "-ldl")
# The driver is part of the program under the sanitizer, which then finds it by its symbols.
SANITIZED = linked("stamps", THREAD, objects([*STAMPS, *SOURCES], THREAD), "-rdynamic", "-ldl")
PAPER = linked("stamps-paper", PLAIN, objects_with_the_papers_keying(STAMPS, PLAIN), "-ldl")
SANITIZED_PAPER = linked(
    "stamps-paper",
    THREAD,
    objects_with_the_papers_keying([*STAMPS, *SOURCES], THREAD),
    "-rdynamic",
    "-ldl",
)


def expect_ok(done: Done) -> None:
    assert (done.returncode, done.stdout) == (0, "stamps: ok\n"), done.stderr


def run(program: Task[Path], library: object, mode: str, seeds: int) -> None:
    """Here and now, not in the background: these depend on who is in time."""
    expect_ok(call(program.result(), library, mode, seeds))


@pytest.mark.parametrize("program", [PROGRAM], ids=str)
@pytest.mark.parametrize("mode", ["found", "planned"])
def test_no_stamp_is_lost(mode: str, program: Task[Path]) -> None:
    run(program, LIBRARY.result(), mode, 36)


@pytest.mark.parametrize("program", [PROGRAM], ids=str)
def test_stamps_are_lost_where_streams_do_not_wait(program: Task[Path]) -> None:
    """The tests above can fail."""
    run(program, LIBRARY.result(), "unordered", 6)


@pytest.mark.parametrize(("program", "mode"), [(PROGRAM, "keying"), (PAPER, "paper")], ids=str)
def test_the_papers_keying_loses_a_stamp(program: Task[Path], mode: str) -> None:
    run(program, LIBRARY.result(), mode, 1)


@pytest.mark.slow
@pytest.mark.parametrize("stamps", [ended(SANITIZED, "", mode, 6) for mode in ("found", "planned")])
def test_stamps_under_the_thread_sanitizer(stamps: Task[Done]) -> None:
    expect_ok(stamps.result())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "mode"), [(SANITIZED, "keying"), (SANITIZED_PAPER, "paper")], ids=str
)
def test_the_papers_keying_under_the_thread_sanitizer(program: Task[Path], mode: str) -> None:
    run(program, "", mode, 6)
