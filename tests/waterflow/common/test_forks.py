import contextlib
import multiprocessing
import multiprocessing.connection
import os
import threading
from multiprocessing import popen_fork

import pytest

from waterflow.common import forks

CONTEXT = multiprocessing.get_context("fork")


@pytest.fixture
def installed():
    forks.install()
    yield
    forks.uninstall()


@contextlib.contextmanager
def lingering_after_fork(monkeypatch, thread):
    """Inside, that thread stays for a while between a fork and what follows it in the parent."""
    real, forked, others = os.fork, threading.Event(), threading.Event()

    def fork():
        pid = real()
        if pid and threading.current_thread() is thread:
            forked.set()
            others.wait(0.5)
        return pid

    monkeypatch.setattr(popen_fork.os, "fork", fork)
    yield forked, others
    monkeypatch.undo()


def test_the_end_of_a_process_is_seen_while_one_forked_beside_it_lives(installed, monkeypatch):
    ends = CONTEXT.Process(target=int)
    starter = threading.Thread(target=ends.start)
    lasting = CONTEXT.Process(target=_wait_for_kill)
    with lingering_after_fork(monkeypatch, starter) as (forked, others):
        starter.start()
        assert forked.wait(10)
        lasting.start()
        others.set()
        starter.join()
    try:
        assert multiprocessing.connection.wait([ends.sentinel], timeout=10)
    finally:
        lasting.kill()
        lasting.join()
        ends.join()


def test_a_process_may_start_others_from_any_of_its_threads(installed):
    parent = CONTEXT.Process(target=_start_another_from_a_thread)
    parent.start()
    parent.join(30)
    found = parent.exitcode
    parent.kill()
    assert found == 0


def test_multiprocessing_is_what_it_was_in_the_end():
    before = popen_fork.Popen._launch
    forks.install()
    forks.install()
    assert popen_fork.Popen._launch is not before
    forks.uninstall()
    assert popen_fork.Popen._launch is not before
    forks.uninstall()
    assert popen_fork.Popen._launch is before


def _wait_for_kill():
    threading.Event().wait(60)


def _start_another_from_a_thread():
    child = CONTEXT.Process(target=int)
    thread = threading.Thread(target=child.start)
    thread.start()
    thread.join()
    child.join()
