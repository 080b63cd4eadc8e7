"""Lanes: threads over one arena, from the first to the last."""

import threading

import pytest
import torch

from waterflow.common.errors import JobError
from waterflow.executor.device.host import HostDevice
from waterflow.executor.run.lanes import Lanes
from waterflow.executor.run.threads import available_cpus, pin_here

pytestmark = pytest.mark.cpu

BUDGET = 1 << 20


@pytest.fixture
def lanes():
    made = Lanes(HostDevice(), BUDGET, lanes=3, threads=1, default_threads=1)
    made.adopt_lane(0)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def unpinned():
    """The thread of a test is a lane's for a while."""
    before, threads = available_cpus(), torch.get_num_threads()
    yield
    pin_here(before)
    torch.set_num_threads(threads)


def test_every_lane_works_on_a_thread_of_its_own_and_the_caller_is_lane_0(lanes):
    threads = {}
    lanes.run_on_all(lambda lane: threads.__setitem__(lane, threading.current_thread()))
    assert threads[0] is threading.current_thread()
    assert {threads[1].name, threads[2].name} == {"waterflow-lane-1", "waterflow-lane-2"}
    again = {}
    lanes.run_on_all(lambda lane: again.__setitem__(lane, threading.current_thread()))
    assert again == threads


def test_lanes_have_their_count_of_threads(lanes):
    counts = []
    lanes.run_on_all(lambda lane: counts.append(torch.get_num_threads()))
    assert counts == [1, 1, 1]


@pytest.mark.parametrize("failing", [0, 2])
def test_what_a_lane_raises_is_raised_when_all_are_done(lanes, failing):
    done = []

    def work(lane):
        if lane == failing:
            raise KeyError(lane)
        done.append(lane)

    with pytest.raises(KeyError, match=str(failing)):
        lanes.run_on_all(work)
    assert sorted(done) == sorted({0, 1, 2} - {failing})
    lanes.run_on_all(done.append)
    assert len(done) == 5


def test_the_scope_takes_memory_from_the_arena_as_its_job(lanes):
    outside = torch.empty(100)
    with lanes.scope(7):
        inside = torch.empty(100)
    assert lanes.arena.owns(inside.data_ptr())
    assert not lanes.arena.owns(outside.data_ptr())
    assert lanes.arena.held(7) == 448  # 400 bytes in units of 64
    del inside
    assert lanes.arena.held(7) == 0


class Counting(HostDevice):
    """Counts what is asked of it; a lane may fail to start."""

    def __init__(self, broken=None):
        self.broken, self.commits, self.closed = broken, 0, False

    def adopt_lane(self, lane):
        if lane == self.broken:
            raise OSError("no such core")

    def commit(self, arena):
        self.commits += 1

    def close(self):
        self.closed = True


def test_the_budget_is_committed_once():
    device = Counting()
    lanes = Lanes(device, BUDGET, 1, 1, 1)
    lanes.commit()
    lanes.commit()
    lanes.close()
    assert device.commits == 1
    assert device.closed


def test_a_lane_that_cannot_start_is_an_error_of_the_next_work_and_no_hang():
    lanes = Lanes(Counting(broken=1), BUDGET, 2, 1, 1)
    while lanes._failure is None:
        pass
    with pytest.raises(OSError, match="no such core"):
        lanes.run_on_all(lambda lane: None)
    lanes.close()


def test_a_budget_that_there_is_not_is_refused():
    with pytest.raises(JobError, match="cannot be had"):
        Lanes(HostDevice(), 1 << 60, 1, 1, 1)


def test_closing_ends_the_threads_and_leaves_tensors_their_memory():
    lanes = Lanes(HostDevice(), BUDGET, 2, 1, 1)
    with lanes.scope(0):
        tensor = torch.full((100,), 5.0)
    lanes.close()
    names = {thread.name for thread in threading.enumerate()}
    assert not any(name.startswith("waterflow-lane") for name in names)
    assert tensor.eq(5).all()


def test_who_stands_in_for_a_lane_has_its_cores_until_it_roams():
    cores = available_cpus()
    if len(cores) < 2:
        pytest.skip("one core")
    lanes = Lanes(HostDevice(), BUDGET, lanes=2, threads=1, default_threads=1)
    share = len(cores) // 2
    found = []

    def helper():
        lanes.adopt_helper()
        for act in (lambda: lanes.stand_in(1), lambda: lanes.stand_in(0), lanes.roam, lanes.roam):
            act()
            found.append(available_cpus())

    thread = threading.Thread(target=helper)
    thread.start()
    thread.join()
    lanes.close()
    assert found == [cores[share : 2 * share], cores[:share], cores, cores]
