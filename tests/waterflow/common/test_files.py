import os

import pytest

from waterflow.common.files import write_atomically

pytestmark = pytest.mark.virtual


def test_a_file_is_made_and_replaced(tmp_path):
    path = tmp_path / "kept"
    write_atomically(path, b"one")
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["kept"], "the temporary file is left"


def test_what_fails_half_way_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "kept"
    write_atomically(path, b"one")

    def full(descriptor):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_atomically(path, b"two")
    assert path.read_bytes() == b"one"
    assert os.listdir(tmp_path) == ["kept"], "the temporary file is left"


def test_a_reader_never_meets_a_part(tmp_path, monkeypatch):
    path = tmp_path / "kept"
    write_atomically(path, b"one")
    seen = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: seen.append(path.read_bytes()))
    write_atomically(path, b"two")
    assert seen == [b"one"]


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        write_atomically(tmp_path / "nowhere" / "file", b"")


def test_what_can_be_made_anew_does_not_wait_for_the_disk(tmp_path, monkeypatch):
    path = tmp_path / "file"
    monkeypatch.setattr(os, "fsync", lambda descriptor: pytest.fail("waits for the disk"))
    write_atomically(path, b"one", durable=False)
    write_atomically(path, b"two", durable=False)
    assert path.read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [path]
