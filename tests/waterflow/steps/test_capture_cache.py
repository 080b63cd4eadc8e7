"""Captures that one process keeps on disk, and others read, or do not."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import waterflow as wf
from tests.support import kept_captures as kept
from tests.support.tables import soaked, thinned
from waterflow.common import cache as cache_module
from waterflow.steps import capture_cache

ROOT = Path(__file__).parents[3]
#: So many processes share the ways.
_SHARES = 3


def trained_elsewhere(folder, *ways, **options):
    """What another process tells of jobs that it has trained, by the way in which each differs."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.kept_captures", *ways],
        env={**os.environ, "WATERFLOW_CACHE": str(folder), "PYTHONHASHSEED": "random"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        **options,
    )
    assert done.returncode == 0, done.stderr
    return {told["way"]: told for told in map(json.loads, done.stdout.splitlines())}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A cache that another process has made."""
    folder = tmp_path_factory.mktemp("made") / "cache"
    told = trained_elsewhere(folder, "nothing")
    assert told["nothing"]["traces"] == 1
    assert told["nothing"]["equal"]
    return folder


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("WATERFLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache_module, "_told", set())
    return tmp_path / "cache"


def files(folder):
    return sorted((folder / "captures").glob("*")) if (folder / "captures").exists() else []


def train(way="nothing", **options):
    """Trains here; what came of it, and the cache's warnings."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        told = kept.train(way, **options)
    return told, [str(one.message) for one in found if one.category is wf.CacheWarning]


def test_what_one_process_has_traced_another_reads(made, tmp_path):
    folder = shutil.copytree(made, tmp_path / "cache")
    for told in trained_elsewhere(folder, *kept.SAME).values():
        assert told == {**told, "traces": 0, "captured": "captured", "equal": True, "error": None}


@pytest.mark.parametrize("share", thinned(range(_SHARES), keep=[0]))
def test_a_job_that_differs_is_traced(made, tmp_path, share):
    folder = shutil.copytree(made, tmp_path / "cache")
    ways = list(kept.OTHER)[share::_SHARES]
    found = trained_elsewhere(folder, *ways, "nothing")
    assert found.pop("nothing")["traces"] == 0, "the file is good"
    assert found.keys() == set(ways)
    wrong = [told for told in found.values() if not (told["traces"] and told["equal"])]
    assert not wrong


def resealed(file, change):
    """Changes what a file holds, with a checksum that fits."""
    head, _, body = file.read_bytes().partition(b"\n")
    document = json.loads(body)
    change(document)
    body = json.dumps(document).encode()
    head = {**json.loads(head), "sha256": hashlib.sha256(body).hexdigest()}
    file.write_bytes(json.dumps(head).encode() + b"\n" + body)


def _of_another_key(file):
    head, _, body = file.read_bytes().partition(b"\n")
    file.write_bytes(json.dumps({**json.loads(head), "key": "0" * 64}).encode() + b"\n" + body)


def _flipped(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _replaced(file, make):
    file.unlink()
    make(file)


def _renamed(document):
    document["operators"] = [
        [name.replace("addmm", "gone"), s] for name, s in document["operators"]
    ]


def _foreign(document):
    document["operators"][0] = ["os.system.default", ""]


DAMAGES = {
    "empty": lambda file: file.write_bytes(b""),
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-100]),
    "a byte": _flipped,
    "zeros": lambda file: file.write_bytes(bytes(5000)),
    "another's": _of_another_key,
    "another format": lambda file: file.write_bytes(b'{"format": "waterflow capture 0"}\n{}'),
    "another version": lambda file: resealed(file, lambda d: d.update(version=0)),
    "an operator that is gone": lambda file: resealed(file, _renamed),
    "another schema": lambda file: resealed(
        file, lambda d: d["operators"][0].__setitem__(1, "aten::other() -> ()")
    ),
    "no operator": lambda file: resealed(file, _foreign),
    "a place too many": lambda file: resealed(file, lambda d: d["forward"].update(loss=10**6)),
    "a list": lambda file: resealed(file, lambda d: d.update(steady=[])),
    "a pipe": lambda file: _replaced(file, os.mkfifo),
    "a folder": lambda file: _replaced(file, os.mkdir),
    "a link": lambda file: _replaced(file, lambda path: path.symlink_to("/dev/zero")),
}


#: One for each thing that is looked at: the head, the sum, the key, the version, the
#: operators, the places of values, and what kind of file it is.
USUAL_DAMAGES = (
    *("empty", "a byte", "another's", "another version", "no operator", "a place too many"),
    "a pipe",
)


@pytest.mark.parametrize("damage", thinned(DAMAGES, USUAL_DAMAGES))
def test_a_damaged_file_is_no_capture(cache, damage):
    train()
    (file,) = files(cache)
    assert train() == ({**train()[0], "traces": 0, "equal": True}, [])
    DAMAGES[damage](file)
    told, warned = train()
    assert told == {**told, "traces": 1, "captured": "captured", "equal": True, "error": None}
    assert len(warned) == 1
    assert "WATERFLOW_CACHE" in warned[0]


def _as_sigmoid(document):
    (place,) = (n for n, (name, _) in enumerate(document["operators"]) if "aten.tanh.d" in name)
    other = torch.ops.aten.sigmoid.default
    document["operators"][place] = [str(other), str(other._schema)]


@pytest.mark.parametrize(
    "change",
    [
        _as_sigmoid,
        lambda document: document["forward"]["gradients"].reverse(),
        soaked(lambda document: document["forward"]["inputs"].reverse()),
        lambda document: document["steady"]["constants"].clear(),
        soaked(lambda document: document["forward"]["nodes"].pop(20)),
    ],
)
def test_a_graph_that_is_not_the_steps_never_trains(cache, change):
    train()
    (file,) = files(cache)
    resealed(file, change)
    told, _ = train()
    assert told == {**told, "traces": 1, "captured": "captured", "equal": True, "error": None}
    train()  # where only later steps were captured anew, the first ones are
    told, _ = train()
    assert told == {**told, "traces": 0, "captured": "captured", "equal": True}


def test_one_switch_keeps_nothing(cache, monkeypatch, tmp_path):
    monkeypatch.setenv("WATERFLOW_CACHE", "off")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        told, warned = train()
        assert told == {**told, "traces": 1, "equal": True}
        assert not warned
    assert not list(tmp_path.iterdir())


def test_without_checks_nothing_is_read_or_kept(cache):
    train(audit="off")
    assert not files(cache)
    train()
    assert len(files(cache)) == 1
    assert train(audit="off")[0]["traces"] == 1


def test_without_a_home_there_is_no_cache(monkeypatch):
    def nobodys():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("WATERFLOW_CACHE")
    monkeypatch.setattr(Path, "home", nobodys)
    monkeypatch.setattr(cache_module, "_told", set())
    told, warned = train()
    assert told == {**told, "traces": 1, "equal": True, "error": None}
    assert len(warned) == 1


def test_a_disk_that_is_full(made, tmp_path):
    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    told = trained_elsewhere(tmp_path / "cache", "nothing", "a global", preexec_fn=limited)
    for one in told.values():
        assert one == {**one, "traces": 1, "equal": True, "error": None}
    assert not files(tmp_path / "cache")


def test_a_folder_of_others(cache):
    train()
    (cache / "captures").chmod(0o777)
    told, warned = train()
    assert told == {**told, "traces": 1, "equal": True, "error": None}
    assert len(warned) == 1


def test_a_file_in_place_of_the_folder(cache):
    cache.mkdir()
    (cache / "captures").write_text("")
    told, warned = train()
    assert told == {**told, "traces": 1, "equal": True, "error": None}
    assert len(warned) == 1


def test_what_is_traced_quickly_is_not_kept(cache, monkeypatch):
    with kept.counting():
        monkeypatch.setattr(capture_cache, "LEAST_SECONDS", 1e6)
        job = kept.Parts().job()
        assert wf.run([job], memory="64MiB").ok
    assert not files(cache)


def test_what_was_not_used_for_longest_goes(cache, monkeypatch):
    train()
    (first,) = files(cache)
    train("a global")
    monkeypatch.setattr(capture_cache, "_MOST_KEPT", int(2.5 * first.stat().st_size))
    os.utime(first, ns=(1, 1))
    assert train()[0]["traces"] == 0, "which counts as a use"
    train("epsilon")
    assert first in files(cache)
    assert len(files(cache)) == 2
