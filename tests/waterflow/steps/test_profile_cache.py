"""Profiles on disk: by what they are known, and that a cache that fails costs time only."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from waterflow.partitioner import EVENT, Profile
from waterflow.steps.profile_cache import profile_path, read_profile, write_profile

pytestmark = pytest.mark.virtual


def path_of(text="g", threads=1, device="cpu"):
    graph = SimpleNamespace(fingerprint=lambda: text)
    return profile_path(graph, threads, SimpleNamespace(identity=device))


def profile_of():
    return Profile(np.array([(0, 8, 0), (1, -8, 0)], dtype=EVENT), np.ones(2), 16, name="a")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("WATERFLOW_CACHE", str(tmp_path))
    return tmp_path


def test_a_profile_is_kept_and_read(cache):
    path = path_of()
    assert path.is_relative_to(cache)
    assert read_profile(path) is None
    write_profile(path, profile_of())
    found = read_profile(path)
    assert found.events.tolist() == profile_of().events.tolist()
    assert found.persistent_bytes == 16


def test_what_changes_a_profile_changes_its_path(cache, monkeypatch):
    assert path_of() == path_of()
    paths = {path_of(), path_of(text="h"), path_of(threads=2), path_of(device="gpu")}
    monkeypatch.setattr(torch, "__version__", "0.0")
    assert len({*paths, path_of()}) == 5


def test_a_damaged_profile_is_none(tmp_path):
    path = tmp_path / "profile.npz"
    path.write_bytes(b"PK no archive")
    assert read_profile(path) is None


def test_a_folder_that_cannot_be_written_is_none_of_the_runs_business(tmp_path):
    (tmp_path / "profiles").write_text("a file where the folder should be")
    path = tmp_path / "profiles" / "profile.npz"
    write_profile(path, profile_of())
    assert read_profile(path) is None
