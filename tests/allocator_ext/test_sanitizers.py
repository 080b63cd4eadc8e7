"""The core under ASan, UBSan and TSan: a C++ driver with threads as lanes, built and run here."""

from pathlib import Path

import pytest

from tests.support.programs import ADDRESS, CORE, THREAD, Done, ended, linked, objects
from tests.support.tasks import Task

pytestmark = pytest.mark.virtual

SOURCES = [*CORE, Path(__file__).with_name("stress.cpp")]
STRESS = [ended(linked("stress", kind, objects(SOURCES, kind))) for kind in (ADDRESS, THREAD)]


@pytest.mark.slow
@pytest.mark.parametrize("stress", STRESS, ids=str)
def test_stress_is_clean(stress: Task[Done]) -> None:
    done = stress.result()
    assert done.returncode == 0, done.stderr
    assert done.stdout == "stress: ok\n"
