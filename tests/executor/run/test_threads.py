"""Intra-op threads and cores of one thread; what other threads get stays."""

import os
import threading
import time

import pytest
import torch

from waterflow.allocator_ext import _C
from waterflow.executor.run.threads import available_cpus, pin_here, set_threads_here, split_cpus

pytestmark = pytest.mark.cpu


def on_a_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def test_a_thread_has_its_own_count_and_later_threads_the_default():
    before = torch.get_num_threads()

    def lane():
        set_threads_here(3, default=before)
        return torch.get_num_threads(), on_a_thread(torch.get_num_threads)

    try:
        assert on_a_thread(lane) == (3, before)
        assert torch.get_num_threads() == before
    finally:
        on_a_thread(lambda: torch.set_num_threads(before))


def test_where_only_torch_can_set_the_count_later_threads_have_the_default(monkeypatch):
    monkeypatch.setattr(_C, "set_intra_op_threads", lambda count: False)
    before = torch.get_num_threads()

    def lane():
        set_threads_here(3, default=2)
        return torch.get_num_threads(), on_a_thread(torch.get_num_threads)

    try:
        assert on_a_thread(lane) == (3, 2)
        assert torch.get_num_threads() == before
    finally:
        on_a_thread(lambda: torch.set_num_threads(before))


@pytest.mark.parametrize(
    ("cpus", "lanes", "threads", "expected"),
    [
        ([0, 1, 2, 3], 2, 2, [[0, 1], [2, 3]]),
        ([0, 1, 2, 3, 4], 2, 2, [[0, 1], [2, 3]]),
        ([4, 6], 2, 1, [[4], [6]]),
        ([0, 1, 2], 2, 2, None),
        ([0], 2, 1, None),
        ([], 1, 1, None),
    ],
)
def test_lanes_get_cores_of_their_own_where_there_are_enough(cpus, lanes, threads, expected):
    assert split_cpus(cpus, lanes, threads) == expected


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system pins no threads")
def test_pinning_is_the_threads_own():
    cpus = available_cpus()
    assert cpus == sorted(os.sched_getaffinity(0))

    def pinned():
        pin_here(cpus[:1])
        inherited = on_a_thread(lambda: os.sched_getaffinity(0))
        pin_here([])  # no cores known: nothing changes
        return os.sched_getaffinity(0), inherited

    assert on_a_thread(pinned) == ({cpus[0]}, {cpus[0]})
    assert available_cpus() == cpus


def threads_of_process():
    return set(os.listdir("/proc/self/task"))


def gone(threads):
    """Whether they all end soon: the system takes its time."""
    until = time.monotonic() + 60
    while threads & threads_of_process() and time.monotonic() < until:
        time.sleep(0.001)
    return not threads & threads_of_process()


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="the system lists no threads")
def test_a_thread_lets_go_of_its_intra_op_threads():
    def kernel():
        return torch.ones(1 << 20).exp_().sum()

    def lane():
        torch.set_num_threads(3)
        before = threads_of_process()
        first = kernel()
        team = threads_of_process() - before
        released = _C.release_intra_op_threads()
        return team, not released or gone(team), first == kernel()

    if "OpenMP" not in torch.__config__.parallel_info():
        pytest.skip("this torch has no OpenMP")
    default = torch.get_num_threads()
    try:
        team, is_gone, equal = on_a_thread(lane)
    finally:
        on_a_thread(lambda: torch.set_num_threads(default))
    assert len(team) == 2
    assert is_gone
    assert equal
