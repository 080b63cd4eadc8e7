"""The benchmark's replay of an allocation log: every allocator goes through it to its end."""

from pathlib import Path

import pytest

from benchmarks.replay import FLAGS, SOURCE, Replay
from tests.support.programs import CORE, PLAIN, linked, objects
from tests.support.tasks import Task

pytestmark = pytest.mark.virtual

#: The source is compiled as it is linked: it alone needs torch's headers.
LIBRARY = linked("libreplay.so", PLAIN, objects(CORE, PLAIN), str(SOURCE), *FLAGS)
SIZES, IDS = [64, 128, -64, 4096, -128, 64], [0, 1, 0, 2, 1, 3]


@pytest.mark.parametrize("library", [LIBRARY], ids=str)
def test_every_allocator_replays_a_log(library: Task[Path]) -> None:
    replay = Replay(library.result())
    for allocator in ("arena", "planned", "malloc", "torch"):
        assert 0 < replay(SIZES, IDS, allocator, 3) < 1e9
    with pytest.raises(ValueError, match="no allocator named 'slab'"):
        replay(SIZES, IDS, "slab", 3)
    with pytest.raises(ValueError, match="one id for each"):
        replay(SIZES, IDS[1:], "arena", 3)
