"""Shared by all tests: profiles go to a folder of the session; programs compile beside tests."""

import contextlib
import gc
import math
import os

# Tests of captured steps want them captured from the first one; tests of tiers turn them on.
os.environ.setdefault("WATERFLOW_TIERS", "off")

import pytest
import torch

# Bars that libraries show start a thread, whose counters a first look at a step's Python may meet
# while they move: such a step is tried once more, which tests of single captures do not do.
with contextlib.suppress(ImportError):
    from tqdm import tqdm

    tqdm.monitor_interval = 0

from tests.support import tasks
from tests.support.fake_cuda import LIBRARY
from waterflow.steps import capture_cache


def tasks_of(item):
    """What a test waits for: the tasks among its parameters."""
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return [value for value in parameters if isinstance(value, tasks.Task)]


def pytest_collection_modifyitems(config, items):
    """Tests that wait for tasks come last, so that the tasks have been done beside the others.

    Where several workers share the tests they come first, so that one worker gets them all and
    compiles what several of them need only once. Those that soak run only where they are asked for.
    """
    items.sort(key=lambda item: bool(tasks_of(item)), reverse=is_worker(config))
    if "soak" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("soak")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("soak")]


def is_worker(config):
    """Whether this is one of several processes that share the tests (pytest-xdist)."""
    return hasattr(config, "workerinput")


def pytest_collection_finish(session):
    # What torch and pytest have made stays: a test that collects garbage, as many do at their end,
    # need not look through half a million objects.
    gc.collect()
    gc.freeze()
    if session.config.option.collectonly or is_worker(session.config):
        return  # every core is busy: each test starts what it waits for
    if any(item.get_closest_marker("fakecuda") for item in session.items):
        LIBRARY.start()
    for item in session.items:
        for task in tasks_of(item):
            task.start()


def pytest_sessionfinish():
    tasks.stop()


@pytest.fixture(scope="session", autouse=True)
def profile_cache(tmp_path_factory):
    """A cache for profiles that the whole session shares, and no other session."""
    before = os.environ.get("WATERFLOW_CACHE")
    folder = tmp_path_factory.mktemp("waterflow-cache")
    os.environ["WATERFLOW_CACHE"] = str(folder)
    yield folder
    if before is None:
        del os.environ["WATERFLOW_CACHE"]
    else:
        os.environ["WATERFLOW_CACHE"] = before


@pytest.fixture(scope="session", autouse=True)
def no_capture_from_another_test():
    """A capture that took long is kept on disk, and would be there for a test that counts them."""
    before, capture_cache.LEAST_SECONDS = capture_cache.LEAST_SECONDS, math.inf
    yield
    capture_cache.LEAST_SECONDS = before


@pytest.fixture(scope="module")
def one_thread():
    """As threads of one operator would wait for each other where the cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
