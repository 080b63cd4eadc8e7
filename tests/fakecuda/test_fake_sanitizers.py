"""The fake driver under ASan, UBSan and TSan: their reports on the core must be about the core."""

from pathlib import Path

import pytest

from tests.support.fake_cuda import SOURCES
from tests.support.programs import ADDRESS, THREAD, Done, ended, linked, objects
from tests.support.tasks import Task

pytestmark = pytest.mark.virtual

HAMMER = [*SOURCES, Path(__file__).with_name("hammer.cpp")]
RUNS = [ended(linked("hammer", kind, objects(HAMMER, kind))) for kind in (ADDRESS, THREAD)]


@pytest.mark.slow
@pytest.mark.parametrize("hammer", RUNS, ids=str)
def test_hammered_driver_is_clean(hammer: Task[Done]) -> None:
    done = hammer.result()
    assert done.returncode == 0, done.stderr
    assert done.stdout == "hammer: ok\n"
