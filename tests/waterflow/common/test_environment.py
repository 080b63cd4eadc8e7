"""What is a library's, and what around a job may change its step graph."""

import os
import sys
import types

import pytest
import torch

from waterflow.common import environment as environments
from waterflow.common.environment import (
    environment,
    is_library,
    is_library_file,
)

pytestmark = pytest.mark.cpu


def test_what_a_version_stands_for():
    for name in ("torch", "torch.nn", "json", "sys", "waterflow.engine.engine"):
        assert is_library(name), name
    for name in ("__main__", "waterflow.models.resnet", "waterflow.models", "not_loaded"):
        assert not is_library(name), name


def test_a_module_is_the_users_by_its_file(tmp_path, monkeypatch):
    module = types.ModuleType("of_the_user")
    monkeypatch.setitem(sys.modules, "of_the_user", module)
    module.__file__ = str(tmp_path / "of_the_user.py")
    assert not is_library("of_the_user")
    assert is_library_file(os.__file__)
    assert is_library_file("<frozen importlib._bootstrap>")
    assert not is_library_file(str(tmp_path / "file.py"))


@pytest.fixture
def few_sources(monkeypatch):
    """Without this package's own files, which take time to read."""
    monkeypatch.setattr(environments, "_OWN_PACKAGES", ())


def test_equal_until_something_changes(few_sources, monkeypatch):
    before = environment()
    assert environment() == before
    with torch.autocast("cpu"):
        assert environment() != before
    with torch.no_grad():
        assert environment() != before
    monkeypatch.setattr(torch, "__version__", "0.0")
    assert environment() != before


def test_the_text_of_the_users_files_counts(few_sources, tmp_path, monkeypatch):
    module, path = types.ModuleType("of_the_user"), tmp_path / "of_the_user.py"
    module.__file__ = str(path)
    path.write_text("x = 1")
    monkeypatch.setitem(sys.modules, "of_the_user", module)
    before = environment()
    path.write_text("x = 2")
    assert environment() != before
    path.unlink()
    with pytest.raises(OSError, match="of_the_user"):
        environment()


def test_the_packages_own_files_count_but_for_its_models():
    names = [line.split()[0] for line in environment().splitlines() if line.startswith("waterflow")]
    assert "waterflow/capture/forward.py" in names
    assert any(name.startswith("waterflow.partitioner/") for name in names)
    assert not any("/models/" in name for name in names)
