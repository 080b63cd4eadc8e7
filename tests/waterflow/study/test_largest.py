from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waterflow.common.errors import BudgetError, JobError
from waterflow.study.largest import largest_alone, largest_size

pytestmark = pytest.mark.virtual


@given(limit=st.integers(0, 10_000), bound=st.one_of(st.none(), st.integers(1, 10_000)))
def test_the_search_finds_the_limit(limit, bound):
    asked = []

    def fits(size):
        asked.append(size)
        return size <= limit

    assert largest_size(fits, bound) == (limit if bound is None else min(limit, bound))
    assert len(asked) <= 32


def test_a_batch_of_one_is_asked_for_last():
    asked = []
    assert largest_size(lambda size: bool(asked.append(size)), None) == 0
    assert asked == [2, 1]


def test_a_search_without_end_is_an_error():
    with pytest.raises(JobError, match="does the model depend on the batch"):
        largest_size(lambda size: True, None)


class Sized:
    """A job that needs so many bytes per sample."""

    is_fixed = False
    name = "net"

    def __init__(self, bytes_per_sample, batch=None):
        self.bytes_per_sample = bytes_per_sample
        self.batch = batch

    def sized_job(self, batch=None):
        needed = self.bytes_per_sample * (batch or 1)
        need = SimpleNamespace(persistent_bytes=0, step_bytes=needed)
        return SimpleNamespace(need=need, solo_bytes=needed)


def test_alone_a_job_takes_what_fits():
    assert largest_alone(Sized(10), 1234) == 123
    assert largest_alone(Sized(10, batch=7), 1234) == 7


def test_what_does_not_fit_alone_says_what_it_needs():
    with pytest.raises(BudgetError, match="net: a batch of 1 needs 2000 bytes"):
        largest_alone(Sized(2000), 1234)
    with pytest.raises(BudgetError, match="net: a batch of 200 needs 2000 bytes"):
        largest_alone(Sized(10, batch=200), 1234)
    fixed = Sized(2000)
    fixed.is_fixed = True
    with pytest.raises(BudgetError, match="net: it needs 2000 bytes"):
        largest_alone(fixed, 1234)
