import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.clusters import job
from waterflow.cluster.local.coordinator import OnGpu
from waterflow.cluster.local.memory import all_or_nothing, coordinated, first_come, squeezed

pytestmark = pytest.mark.virtual


def test_a_guaranteed_job_has_all_it_asks_for_and_its_guest_the_rest():
    # AntMan, section 5.1: ResNet-50 takes 30 of 32 GB, and GCN the 2 that are left.
    guest = OnGpu(job(0, memory=35, least_memory=5), True)
    first = OnGpu(job(1, memory=300), False)
    assert coordinated([guest, first], 320) == [20, 300]
    assert first_come([guest, first], 320) == [35, 285]
    assert all_or_nothing([guest, first], 320) == [35, 0]
    assert coordinated([guest, first], 400) == [35, 300]


def test_memory_goes_to_the_guest_that_gains_most():
    # AntMan, Figure 10: one hardly notices that it has a tenth, one needs all.
    modest = OnGpu(job(0, memory=100, least_memory=10, curve=((0.1, 0.75), (0.5, 1.0))), True)
    greedy = OnGpu(job(1, memory=100, least_memory=10, curve=((0.1, 0.1), (0.9, 0.4))), True)
    had = coordinated([modest, greedy], 160)
    assert had == [60, 100]
    assert squeezed(modest.spec, had[0]) == 1.0


def test_a_curve_is_followed_between_its_points():
    spec = job(0, memory=100, least_memory=10, curve=((0.1, 0.4), (0.5, 0.8)))
    assert [squeezed(spec, n) for n in (5, 10, 30, 50, 75, 100, 200)] == pytest.approx(
        [0.2, 0.4, 0.6, 0.8, 0.9, 1.0, 1.0]
    )
    plain = job(0, memory=100, least_memory=10)
    assert [squeezed(plain, n) for n in (9, 10, 99)] == [0.0, 1.0, 1.0]


@given(
    jobs=st.lists(st.tuples(st.integers(0, 90), st.booleans()), min_size=1, max_size=4),
    capacity=st.integers(360, 720),
)
def test_nobody_has_more_than_it_asks_for_nor_all_more_than_there_is(jobs, capacity):
    there = [
        OnGpu(job(n, memory=2 * size, least_memory=size), guest)
        for n, (size, guest) in enumerate(jobs)
    ]
    given_bytes = coordinated(there, capacity)
    assert sum(given_bytes) <= capacity
    for has, one in zip(given_bytes, there, strict=True):
        assert one.spec.floor <= has <= one.spec.memory
