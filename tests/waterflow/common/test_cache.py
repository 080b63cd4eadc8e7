"""Whatever is wrong with the cache, it is said once and nothing else happens."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest

import waterflow as wf
from waterflow.common import cache as cache_module
from waterflow.common.cache import (
    cache_directory,
    cached_names,
    distrust_cached,
    drop_cached,
    mark_used,
    read_cached,
    trim_cached,
    write_cached,
)

pytestmark = pytest.mark.virtual

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("WATERFLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache_module, "_told", set())
    return tmp_path / "cache"


def told(function):
    """What a function returns, and the cache's warnings meanwhile."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        result = function()
    return result, [str(one.message) for one in found if one.category is wf.CacheWarning]


def use(times=3):
    """Writes and reads a few times; returns what was read last."""
    for number in range(times):
        write_cached("kind", f"name-{number}", b"content")
        found = read_cached("kind", f"name-{number}")
    return found


def assert_no_cache(match):
    found, warned = told(use)
    assert found is None
    assert len(warned) == 1, "once"
    assert match in warned[0]
    assert "WATERFLOW_CACHE" in warned[0]


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("WATERFLOW_CACHE", str(tmp_path))
    assert cache_directory() == tmp_path
    monkeypatch.setenv("WATERFLOW_CACHE", "")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert cache_directory() == tmp_path / ".cache" / "waterflow"


def test_it_can_be_switched_off(cache, monkeypatch, tmp_path):
    use()
    monkeypatch.setenv("WATERFLOW_CACHE", "off")
    monkeypatch.chdir(tmp_path)
    assert told(use) == (None, [])
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_what_is_written_is_read(cache):
    assert told(lambda: read_cached("kind", "name")) == (None, []), "nothing there is no fault"
    assert told(use) == (b"content", [])
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert stat.S_IMODE((cache / "kind" / "name-0").stat().st_mode) == 0o600


def test_a_file_in_place_of_the_folder(cache):
    cache.write_text("")
    assert_no_cache("File exists")


def test_a_file_in_place_of_the_inner_folder(cache):
    cache.mkdir()
    (cache / "kind").write_text("")
    assert_no_cache("kind")


def test_links_in_a_circle(cache):
    cache.symlink_to(cache)
    assert_no_cache(str(cache))


def test_a_full_disk(cache, monkeypatch):
    full = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    monkeypatch.setattr(Path, "replace", lambda self, target: full.write(self.read_bytes()))
    assert_no_cache("No space left on device")
    assert not list((cache / "kind").iterdir()), "no part stays"


def test_a_file_that_may_not_grow(cache):
    """The kernel's own limit, in a process of its own."""
    script = """
    import resource, warnings
    from waterflow.common.cache import read_cached, write_cached
    warnings.simplefilter("always")
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    for number in range(3):
        write_cached("kind", f"{number}", bytes(2000))
        assert read_cached("kind", f"{number}") is None
    write_cached("kind", "small", b"content")
    assert read_cached("kind", "small") == b"content"
    """
    done = python(script)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("CacheWarning: the cache") == 1
    assert "File too large" in done.stderr
    assert [path.name for path in (cache / "kind").iterdir()] == ["small"]


def python(script, **options):
    command = [sys.executable, "-c", textwrap.dedent(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=250, **options)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_something_else_in_place_of_a_file(cache, make):
    use(1)
    path = cache / "kind" / "other"
    make(path)
    found, warned = told(lambda: [read_cached("kind", "other") for _ in range(3)])
    assert found == [None] * 3
    assert len(warned) == 1
    assert "other" in warned[0] or "symbolic links" in warned[0]
    if not path.is_dir():
        write_cached("kind", "other", b"anew")
        assert read_cached("kind", "other") == b"anew"


@AS_ROOT
@pytest.mark.parametrize("part", [".", "kind"])
def test_a_folder_of_somebody_else(cache, part):
    told(use)
    os.chown(cache / part, 54321, 54321)
    assert_no_cache("belongs to the user 54321")


@AS_ROOT
def test_a_file_of_somebody_else(cache):
    use(1)
    os.chown(cache / "kind" / "name-0", 54321, -1)
    found, warned = told(lambda: read_cached("kind", "name-0"))
    assert found is None
    assert len(warned) == 1
    assert "belongs to the user 54321" in warned[0]


@pytest.mark.parametrize("part", [".", "kind"])
def test_a_folder_that_everybody_can_write_to(cache, part):
    told(use)
    (cache / part).chmod(0o777)
    assert_no_cache("chmod o-w")


def test_a_file_that_everybody_can_write_to(cache):
    use(1)
    (cache / "kind" / "name-0").chmod(0o666)
    assert told(lambda: read_cached("kind", "name-0"))[0] is None
    write_cached("kind", "name-0", b"anew")
    assert read_cached("kind", "name-0") == b"anew"


def test_a_group_may_have_the_folder(cache):
    told(use)
    cache.chmod(0o775)
    assert told(use) == (b"content", [])


def test_no_home(cache, monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("WATERFLOW_CACHE")
    monkeypatch.setattr(Path, "home", home)
    assert_no_cache("no home directory")


@AS_ROOT
def test_a_user_whom_the_system_does_not_know(cache):
    """Neither $HOME nor an entry in the list of users; all is imported before."""
    script = """
    import os, warnings
    from waterflow.common.cache import read_cached, write_cached
    warnings.simplefilter("always")
    for name in ("HOME", "WATERFLOW_CACHE"):
        os.environ.pop(name, None)
    os.setuid(54321)
    for number in range(3):
        write_cached("kind", "name", b"content")
        assert read_cached("kind", "name") is None
    """
    done = python(script)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("CacheWarning: the cache") == 1
    assert "no home directory" in done.stderr


def test_contents_that_are_damaged(cache):
    _, warned = told(lambda: [distrust_cached("kind", f"n-{n}", "no archive") for n in range(3)])
    assert len(warned) == 1
    assert "kind/n-0" in warned[0]
    assert "no archive" in warned[0]


def test_each_cache_is_told_about(cache, monkeypatch, tmp_path):
    cache.write_text("")
    assert_no_cache("File exists")
    (tmp_path / "another").write_text("")
    monkeypatch.setenv("WATERFLOW_CACHE", str(tmp_path / "another"))
    assert_no_cache("another")


def test_a_folder_is_trimmed_by_use(cache):
    for number in range(4):
        write_cached("kind", f"name-{number}", bytes(100))
        os.utime(cache / "kind" / f"name-{number}", ns=(number, number))
    mark_used("kind", "name-0")
    trim_cached("kind", 250)
    assert sorted(cached_names("kind")) == ["name-0", "name-3"]
    drop_cached("kind", "name-3")
    drop_cached("kind", "name-3")
    assert cached_names("kind") == ["name-0"]


def test_looking_into_what_is_not_there_is_no_fault(cache, monkeypatch):
    def look():
        mark_used("kind", "name")
        drop_cached("kind", "name")
        trim_cached("kind", 0)
        return cached_names("kind")

    assert told(look) == ([], [])
    monkeypatch.setenv("WATERFLOW_CACHE", "off")
    assert told(look) == ([], [])


def test_names_in_a_folder_of_others_are_not_trusted(cache):
    use()
    (cache / "kind").chmod(0o777)
    names, warned = told(lambda: cached_names("kind"))
    assert names == []
    assert len(warned) == 1
