import gc
import multiprocessing
import threading
import time

import pytest

from waterflow.common import garbage

NEVER = 1 << 30
CONTEXT = multiprocessing.get_context("fork")


@pytest.fixture
def before():
    garbage._allow()
    found = gc.get_threshold()
    yield found
    gc.set_threshold(*found)


@pytest.fixture
def installed(before):
    gc.collect()
    garbage.install()
    yield
    garbage.uninstall()


def collect_middle():
    """The thresholds, once younger objects have been collected."""
    gc.collect(1)
    return gc.get_threshold()


def test_full_collections_are_put_off_for_a_while(before, installed, monkeypatch):
    young, middle, _ = before
    assert collect_middle() == (young, middle, NEVER)
    monkeypatch.setattr(garbage, "_took", 0.0)
    assert collect_middle() == before
    gc.collect()
    assert garbage._took > 0.0
    assert collect_middle() == (young, middle, NEVER)


def test_one_comes_when_it_is_due(installed, monkeypatch):
    monkeypatch.setattr(garbage, "_took", 0.0)
    full = []

    def note(phase, info):
        if phase == "start" and info["generation"] == 2:
            full.append(info)

    gc.callbacks.append(note)
    try:
        kept = []
        while not full and len(kept) < 3_000_000:
            kept.append([])
    finally:
        gc.callbacks.remove(note)
    assert full


def test_their_pauses_are_known_also_of_the_one_under_way(installed):
    objects = [[object()] for _ in range(300_000)]
    before = garbage.paused_seconds()
    gc.collect(1)
    assert garbage.paused_seconds() == before
    seen = []

    class Late:
        def __del__(self):
            seen.append(garbage.paused_seconds())

    late = Late()
    late.itself = late
    del late
    begun = time.perf_counter()
    gc.collect()
    took = time.perf_counter() - begun
    del objects
    assert 0.0 < seen[0] - before <= garbage.paused_seconds() - before <= took


def test_they_are_what_they_were_when_one_is_due_after_the_last(before, monkeypatch):
    gc.collect()
    garbage.install()
    garbage.uninstall()
    found = gc.get_threshold()
    assert found[2] == NEVER
    monkeypatch.setattr(garbage, "_took", 0.0)
    assert collect_middle() == before
    gc.set_threshold(*found)  # by somebody who had asked for them
    assert collect_middle() == before
    gc.collect()
    assert collect_middle() == before, "nothing is put off any more"


def test_whoever_else_sets_thresholds_is_heeded(before, installed, monkeypatch):
    gc.set_threshold(900, 7, 5)
    assert collect_middle() == (900, 7, NEVER)
    with monkeypatch.context() as patch:
        patch.setattr(garbage, "_took", 0.0)
        assert collect_middle() == (900, 7, 5)
    gc.set_threshold(0)
    assert collect_middle()[0] == 0, "nobody collects"


def test_threads_may_come_and_go(before):
    def use():
        for _ in range(200):
            garbage.install()
            gc.collect(0)
            garbage.uninstall()

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert gc.callbacks.count(garbage._note) == 1
    assert garbage._installed == 0


def _thresholds(answer):
    found = gc.get_threshold()
    gc.collect()
    answer.send((found, gc.get_threshold()))


def test_a_forked_process_collects_as_ever(before, installed):
    here, there = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_thresholds, args=(there,))
    process.start()
    assert here.recv() == (before, before)
    process.join()
