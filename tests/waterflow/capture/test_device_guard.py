"""torch's stand-in for CUDA's guard is made where it stays."""

import threading

import pytest
import torch

from waterflow.capture import device_guard

pytestmark = pytest.mark.cpu


@pytest.fixture
def made_on(monkeypatch):
    """The threads on which the stand-in is made."""
    threads = []
    own = torch._C._ensureCUDADeviceGuardSet

    def make():
        threads.append(threading.current_thread())
        own()

    monkeypatch.setattr(torch._C, "_ensureCUDADeviceGuardSet", make)
    device_guard.keep_device_guard.cache_clear()
    yield threads
    device_guard.keep_device_guard.cache_clear()


@pytest.mark.parametrize(
    ("is_compiled", "is_available", "times"), [(True, False, 1), (True, True, 0), (False, False, 0)]
)
def test_the_thread_that_makes_it_stays(monkeypatch, made_on, is_compiled, is_available, times):
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: is_compiled)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_available)
    for _ in range(2):
        asking = threading.Thread(target=device_guard.keep_device_guard)
        asking.start()
        asking.join()
    assert len(made_on) == times
    assert all(thread.is_alive() and thread.daemon for thread in made_on)
