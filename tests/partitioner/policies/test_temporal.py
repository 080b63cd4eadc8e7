import pytest

from tests.support.plans import named
from waterflow.partitioner import GroupRef
from waterflow.partitioner.policies import Temporal
from waterflow.partitioner.testing import triangle

pytestmark = pytest.mark.virtual


def test_temporal():
    jobs = named(triangle(2, persistent=3), triangle(4, persistent=5))
    schedule = Temporal().schedule(jobs, 12, lanes=3)
    assert schedule.pairs == ((GroupRef(0, 0), None, None), (GroupRef(1, 0), None, None))
    assert schedule.peak_bytes == 12
    assert schedule.overlap([job.profile for job in jobs]) == 0
