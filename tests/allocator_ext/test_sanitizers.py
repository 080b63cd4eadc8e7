"""The core under ASan, UBSan and TSan: a C++ driver with threads as lanes, built and run here."""

import json
from pathlib import Path

import pytest

from tests.support.programs import (
    ADDRESS,
    CORE,
    THREAD,
    Done,
    ended,
    linked,
    objects,
    objects_with_the_papers_keying,
)
from tests.support.tasks import Task

pytestmark = pytest.mark.virtual

HERE = Path(__file__).parent
SOURCES = [*CORE, HERE / "drive.cpp", HERE / "stress.cpp"]
STRESS = [ended(linked("stress", kind, objects(SOURCES, kind))) for kind in (ADDRESS, THREAD)]
DRIVE = [*CORE, HERE / "drive.cpp", HERE / "drive_main.cpp"]
PAPER = [
    ended(
        linked("drive-paper", kind, objects_with_the_papers_keying(DRIVE, kind)),
        *("run", 1, 5_000, 2),
    )
    for kind in (ADDRESS, THREAD)
]


@pytest.mark.slow
@pytest.mark.parametrize("stress", STRESS, ids=str)
def test_stress_is_clean(stress: Task[Done]) -> None:
    done = stress.result()
    assert done.returncode == 0, done.stderr
    assert done.stdout == "stress: ok\n"


@pytest.mark.slow
@pytest.mark.parametrize("drive", PAPER, ids=str)
def test_the_papers_keying_is_noticed(drive: Task[Done]) -> None:
    done = drive.result()
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["violations"] > 0
