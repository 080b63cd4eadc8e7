"""Where files are kept, and that a reader never sees half of one."""

import os
from pathlib import Path

import pytest

from waterflow.common.files import cache_directory, write_atomically

pytestmark = pytest.mark.virtual


def test_the_cache_is_where_the_user_wants_it(monkeypatch):
    monkeypatch.setenv("WATERFLOW_CACHE", "/somewhere/else")
    assert cache_directory() == Path("/somewhere/else")
    monkeypatch.delenv("WATERFLOW_CACHE")
    assert cache_directory() == Path.home() / ".cache" / "waterflow"


def test_a_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, b"old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_what_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, function):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def fail(*arguments):
        raise OSError("no space")

    if function == "fsync":
        monkeypatch.setattr(os, "fsync", fail)
    else:
        monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(OSError, match="none"):
        write_atomically(tmp_path / "none" / "file", b"")
