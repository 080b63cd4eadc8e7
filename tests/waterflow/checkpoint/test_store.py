"""Checkpoints on disk: whole whatever happens to the process, the disk or the files."""

import contextlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import waterflow as wf
from waterflow.checkpoint.snapshot import JobSnapshot
from waterflow.checkpoint.store import CheckpointFolder, folder_name

pytestmark = pytest.mark.cpu


def snapshot(steps, job="a", size=1000):
    filled = torch.from_numpy(np.full(size, float(steps)))  # no threads: processes are forked here
    tensors = {"x": filled, "n": torch.tensor(steps), "e": torch.ones(0)}
    return JobSnapshot(job, "running", {"position": {"steps": steps}}, tensors)


def assert_whole(kept):
    assert set(kept.tensors) == {"x", "n", "e"}
    assert bool((kept.tensors["x"] == kept.steps).all())
    assert int(kept.tensors["n"]) == kept.steps


def test_the_latest_is_read_and_former_tensors_go(tmp_path):
    folder = CheckpointFolder(tmp_path / "runs" / "a")
    with folder.opened(["a", "b"]):
        for steps in (1, 2):
            assert folder.write(snapshot(steps)) > 4000
    assert_whole(folder.read("a"))
    assert folder.read("a").steps == 2
    assert folder.read("b") is None
    assert folder.jobs() == ["a", "b"]
    assert sorted(path.suffix for path in (folder.path / "a").iterdir()) == [
        ".json",
        ".safetensors",
    ]


def test_the_tensors_are_a_file_of_safetensors(tmp_path):
    kinds = [torch.bool, torch.bfloat16, torch.int64, torch.float32, torch.uint8]
    tensors = {str(kind): torch.arange(3).to(kind) for kind in kinds}
    folder = CheckpointFolder(tmp_path)
    folder.write(JobSnapshot("a", "running", {"position": {"steps": 0}}, tensors))
    (path,) = (tmp_path / "a").glob("*.safetensors")
    found = load_file(path)
    assert all(found[name].equal(tensors[name]) for name in tensors)


def test_names_of_jobs_are_no_paths(tmp_path):
    names = ["a", "A", "../a", "a/b", "a b", "", "x" * 300, "\u00e9", ".", "\ud800"]
    assert len({folder_name(name) for name in names}) == len(names)
    folder = CheckpointFolder(tmp_path / "here")
    with folder.opened(names):
        for place, name in enumerate(names):
            folder.write(snapshot(place, name))
    assert [folder.read(name).steps for name in names] == list(range(len(names)))
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def write_on(folder, first, told):
    """Writes one checkpoint after another, and tells of each."""
    with folder.opened(["a"]):
        for steps in range(first, first + 100_000):
            folder.write(snapshot(steps, size=100_000))
            told.send(steps)


@pytest.mark.parametrize("times", [25, pytest.param(1000, marks=pytest.mark.soak)])
def test_a_process_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path, times):
    draw, known, folder = random.Random(times), 0, CheckpointFolder(tmp_path)
    fork = multiprocessing.get_context("fork")
    for _ in range(times):
        here, there = fork.Pipe(duplex=False)
        writer = fork.Process(target=write_on, args=(folder, known + 1, there))
        writer.start()
        there.close()
        told = here.recv()
        time.sleep(draw.uniform(0, 0.02))
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        with contextlib.suppress(EOFError):
            while True:
                told = here.recv()
        kept = folder.read("a")
        assert_whole(kept)
        assert kept.steps in (told, told + 1)
        known = kept.steps
    assert len(list((tmp_path / "a").iterdir())) <= 6  # what was left is cleared up by the next


def write_and_fork(folder, told):
    """Is in the folder, and forks a process that outlives it, as a data loader's workers do."""
    with folder.opened(["a"]):
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
        told.send(child)
        time.sleep(60)


def test_a_forked_process_does_not_keep_others_out(tmp_path):
    """Neither after its parent was killed, nor after that has left the folder."""
    folder, fork = CheckpointFolder(tmp_path), multiprocessing.get_context("fork")
    here, there = fork.Pipe(duplex=False)
    killed = fork.Process(target=write_and_fork, args=(folder, there))
    killed.start()
    orphan = here.recv()
    worker = fork.Process(target=time.sleep, args=(60,))
    try:
        with pytest.raises(wf.CheckpointError, match="another process"), folder.opened(["a"]):
            pass
        killed.kill()
        killed.join()
        with folder.opened(["a"]):
            worker.start()
        with folder.opened(["a"]):
            pass
    finally:
        os.kill(orphan, signal.SIGKILL)
        worker.kill()
        worker.join()


def test_each_moment_of_a_write_leaves_a_whole_checkpoint(tmp_path, monkeypatch):
    """The process ends before each call that changes the folder, in turn."""

    class Killed(BaseException):
        pass

    names = ["fsync", "replace", "open", "unlink"]
    originals = {name: getattr(os, name) for name in names}
    folder, moments = CheckpointFolder(tmp_path), 0
    folder.write(snapshot(1))
    for moment in range(1000):
        left = moment

        def counted(name):
            def call(*args, **options):
                nonlocal left
                left -= 1
                if left < 0:
                    raise Killed
                return originals[name](*args, **options)

            return call

        for name in names:
            monkeypatch.setattr(os, name, counted(name))
        try:
            folder.write(snapshot(2 + moment))
            moments = moment
            break
        except Killed:
            pass
        finally:
            monkeypatch.undo()
        kept = folder.read("a")
        assert_whole(kept)
        assert kept.steps in (1, 2 + moment)
        folder.write(snapshot(1))
    assert moments > 4


LIMITED = """
import resource, sys
import torch
from tests.waterflow.checkpoint.test_store import assert_whole, snapshot
from waterflow.checkpoint.store import CheckpointFolder
folder = CheckpointFolder(sys.argv[1])
with folder.opened(["a"]):
    folder.write(snapshot(1, size=1000))
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        folder.write(snapshot(2, size=100_000))
    except OSError:
        assert_whole(folder.read("a"))
        assert folder.read("a").steps == 1
        assert len(list((folder.path / "a").iterdir())) == 2
        print("kept")
"""


def test_a_full_disk_leaves_the_former_checkpoint_and_nothing_else(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, timeout=250
    )
    assert done.stdout == "kept\n", done.stderr


def test_one_process_at_a_time(tmp_path):
    with (
        CheckpointFolder(tmp_path).opened(["a"]),
        pytest.raises(wf.CheckpointError, match="another process writes"),
        CheckpointFolder(tmp_path).opened(["a"]),
    ):
        pass
    with CheckpointFolder(tmp_path).opened(["a"]):
        pass


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    folder = CheckpointFolder(tmp_path / "file" / "a")
    with pytest.raises(wf.CheckpointError, match=r"file/a: .*another folder"), folder.opened(["a"]):
        pass


@pytest.fixture
def written(tmp_path):
    folder = CheckpointFolder(tmp_path)
    folder.write(snapshot(3))
    (tensors,) = (tmp_path / "a").glob("*.safetensors")
    return folder, tmp_path / "a" / "checkpoint.json", tensors


def flipped(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_flipped_bit_is_found(written, share):
    folder, _, tensors = written
    flipped(tensors, int(share * tensors.stat().st_size))
    with pytest.raises(wf.CheckpointError, match=r"'a'.*\.safetensors is damaged: its checksum"):
        folder.read("a")


def test_a_flipped_bit_of_the_fields_is_found(written):
    folder, fields, _ = written
    text = fields.read_text()
    fields.write_text(text.replace('"steps":3', '"steps":4'))
    with pytest.raises(wf.CheckpointError, match=r"checkpoint\.json is damaged: its checksum"):
        folder.read("a")


def test_missing_and_short_files_are_found(written):
    folder, fields, tensors = written
    content = tensors.read_bytes()
    tensors.write_bytes(content[:-1])
    with pytest.raises(wf.CheckpointError, match=f"has {len(content) - 1} bytes, and had"):
        folder.read("a")
    tensors.unlink()
    with pytest.raises(wf.CheckpointError, match=r"its file .*\.safetensors is missing"):
        folder.read("a")
    fields.write_text("{")
    with pytest.raises(wf.CheckpointError, match="it is no JSON"):
        folder.read("a")
    fields.write_text("[]")
    with pytest.raises(wf.CheckpointError, match="no checkpoint of waterflow's"):
        folder.read("a")


def test_another_version_is_refused(written):
    folder, fields, _ = written
    content = json.loads(fields.read_text()) | {"version": 2}
    fields.write_text(json.dumps(content))
    with pytest.raises(wf.CheckpointError, match=r"version 2, this waterflow reads version 1: "):
        folder.read("a")


def test_no_run_is_named(tmp_path):
    with pytest.raises(wf.CheckpointError, match=r"no checkpoint at .*run\.json is missing"):
        CheckpointFolder(tmp_path).jobs()


def test_tensors_elsewhere_are_not_read(written):
    """A name in a file of somebody else's leads out of the folder nowhere."""
    folder, fields, tensors = written
    outside = tensors.parent.parent / "outside.safetensors"
    tensors.rename(outside)
    from waterflow.checkpoint.store import _sealed

    content = json.loads(fields.read_text())["fields"]
    content["tensors"]["file"] = "../outside.safetensors"
    fields.write_bytes(_sealed(content))
    with pytest.raises(wf.CheckpointError, match="is missing"):
        folder.read("a")
