"""Profiles on disk: by what they are known, and that a cache that fails costs time only."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import waterflow as wf
from waterflow.common import cache as cache_module
from waterflow.job.batch import flatten
from waterflow.partitioner import EVENT, Profile
from waterflow.steps.profile_cache import profile_name, read_profile, write_profile

pytestmark = pytest.mark.virtual


def name_of(text="g", threads=1, device="cpu", batch=None):
    graph = SimpleNamespace(fingerprint=lambda: text)
    flat = flatten([torch.zeros(8)] if batch is None else [batch])
    return profile_name(graph, threads, SimpleNamespace(identity=device, queues=False), flat)


def profile_of():
    return Profile(np.array([(0, 8, 0), (1, -8, 0)], dtype=EVENT), np.ones(2), 16, name="a")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("WATERFLOW_CACHE", str(tmp_path))
    monkeypatch.setattr(cache_module, "_told", set())
    return tmp_path / "profiles"


def test_a_profile_is_kept_and_read(cache):
    assert read_profile(name_of(), 2) is None
    write_profile(name_of(), profile_of())
    assert [path.name for path in cache.iterdir()] == [name_of()]
    found = read_profile(name_of(), 2)
    assert found.events.tolist() == profile_of().events.tolist()
    assert found.persistent_bytes == 16


def test_what_changes_a_profile_changes_its_name(cache, monkeypatch):
    assert name_of() == name_of()
    names = {name_of(), name_of(text="h"), name_of(threads=2), name_of(device="gpu")}
    monkeypatch.setattr(torch, "__version__", "0.0")
    assert len({*names, name_of()}) == 5


def test_a_damaged_profile_is_none(cache):
    write_profile("x.npz", profile_of())
    whole = (cache / "x.npz").read_bytes()
    (cache / "x.npz").write_bytes(b"PK no archive")
    with pytest.warns(wf.CacheWarning, match=r"x\.npz in it is damaged"):
        assert read_profile("x.npz", 2) is None
    for end in range(0, len(whole), 97):
        (cache / "x.npz").write_bytes(whole[:end])
        assert read_profile("x.npz", 2) is None


def test_a_profile_of_another_step_is_none(cache):
    write_profile("x.npz", profile_of())
    with pytest.warns(wf.CacheWarning, match="2 nodes for a step of 3"):
        assert read_profile("x.npz", 3) is None


def test_a_folder_that_cannot_be_written_is_none_of_the_runs_business(cache):
    cache.write_text("a file where the folder should be")
    with pytest.warns(wf.CacheWarning, match="profiles"):
        write_profile("x.npz", profile_of())
    assert read_profile("x.npz", 2) is None
