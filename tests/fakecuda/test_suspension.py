"""Jobs that rest on a device: their tensors lie in the host's memory, the device's is free."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import waterflow as wf
from tests.support.differences import assert_same_numbers, differences
from tests.support.fake_cuda import FakeDriver
from tests.support.fake_device import FakeCudaDevice
from tests.support.jobs import MODELS, OPTIMIZERS, SCHEDULERS
from waterflow.allocator_ext import _C
from waterflow.checkpoint.snapshot import JobSnapshot
from waterflow.checkpoint.store import CheckpointFolder
from waterflow.checkpoint.writer import SnapshotWriter
from waterflow.engine.checkpoints import Checkpoints

pytestmark = [pytest.mark.fakecuda, pytest.mark.usefixtures("one_thread")]

JOBS = {**MODELS, **SCHEDULERS, **OPTIMIZERS}
NAMES = ["cnn_shuffled", "noisy_shuffled", "amsgrad_plain", "encoder"]
OUT_OF_MEMORY = 2


class Stop:
    """Has a job tell when it has made so many steps, and lets nobody miss it."""

    def __init__(self, job: wf.Job, step: int) -> None:
        self._step = step
        self._reached, self._goes_on = threading.Event(), threading.Event()
        job.on_step = self._look

    def _look(self, result: wf.StepResult) -> None:
        if result.step == self._step:
            self._reached.set()
            assert self._goes_on.wait(300)

    def suspend(self, handle: wf.JobHandle) -> None:
        """Suspends the job at that step, and returns when it rests."""
        assert self._reached.wait(300)
        handle.suspend()
        self._goes_on.set()
        assert handle.suspend(timeout=300)


def tensors(job: wf.Job) -> list[torch.Tensor]:
    state = [v for each in job.optimizer.state.values() for v in each.values()]
    held = [*job.model.parameters(), *job.model.buffers(), *state]
    return [tensor for tensor in held if isinstance(tensor, torch.Tensor) and tensor.numel()]


def is_inside(tensor: torch.Tensor) -> bool:
    return bool(_C.is_in_arena(tensor.untyped_storage().data_ptr()))


def expected(name: str, **options: Any) -> tuple[wf.Job, wf.JobReport]:
    job = JOBS[name](**options)
    return job, wf.run_eager(job, threads=1)


@pytest.mark.parametrize("name", NAMES)
def test_a_job_that_rested_has_the_numbers_of_one_that_did_not(
    name: str, driver: FakeDriver
) -> None:
    driver.delay(150, seed=len(name))
    job, beside = JOBS[name](epochs=4), JOBS["tied"]()
    stop = Stop(job, 5)
    with wf.Engine("64MiB", device=FakeCudaDevice(), threads=1) as engine:
        handle, other = engine.submit(job), engine.submit(beside)
        stop.suspend(handle)
        assert engine._arena.held(0) == 0
        assert not any(map(is_inside, tensors(job)))
        assert all(map(_C.is_parked, tensors(job)))
        copy = [tensor.detach().clone() for tensor in tensors(job)]
        assert other.result(300).state == "finished"
        assert all(map(torch.equal, copy, tensors(job)))
        handle.resume()
        assert handle.result(300).state == "finished"
    assert_same_numbers(*expected(name, epochs=4), job, engine.report()[job.name])
    assert_same_numbers(*expected("tied"), beside, engine.report()[beside.name])
    assert not any(map(_C.is_parked, tensors(job)))
    parked = sum(tensor.untyped_storage().nbytes() for tensor in copy)
    assert engine.report().pinned_bytes >= parked


def test_its_room_is_another_s(driver: FakeDriver) -> None:
    """Two jobs in the room of one and a little: the second runs while the first rests."""
    first, second = JOBS["cnn"](epochs=3), JOBS["cnn"](epochs=1)
    second.name = "second"
    with pytest.raises(wf.BudgetError) as caught:
        wf.run([JOBS["cnn"]()], "1KiB", device=FakeCudaDevice(), threads=1)
    need = int(str(caught.value).split("needs ")[1].split()[0])
    stop = Stop(first, 2)
    with wf.Engine(need + need // 8, device=FakeCudaDevice(), threads=1) as engine:
        engine.hold()
        one, other = engine.submit(first), engine.submit(second)
        engine.release()
        stop.suspend(one)
        assert other.result(300).state == "finished"
        one.resume()
        assert one.result(300).state == "finished"
    assert_same_numbers(*expected("cnn", epochs=3), first, engine.report()["cnn"])
    assert engine.report().peak_bytes <= need + need // 8


def test_one_that_ends_while_it_rests_keeps_its_numbers(driver: FakeDriver) -> None:
    job, whole = JOBS["cnn"](epochs=4), JOBS["cnn"](epochs=4)
    stop = Stop(job, 3)
    seen: list[list[torch.Tensor]] = []
    whole.on_step = lambda result: (
        seen.append([p.detach().clone() for p in whole.model.parameters()])
        if result.step == 3
        else None
    )
    wf.run_eager(whole, threads=1)
    with wf.Engine("64MiB", device=FakeCudaDevice(), threads=1) as engine:
        handle = engine.submit(job)
        stop.suspend(handle)
        handle.stop()
        assert handle.result(300).state == "stopped"
        assert not any(map(_C.is_parked, tensors(job)))
    assert all(map(torch.equal, seen[0], job.model.parameters()))


def test_weights_whose_address_somebody_knows_stay(driver: FakeDriver) -> None:
    job = JOBS["cnn"](epochs=4)
    weight = next(job.model.parameters()).detach()
    array = np.from_dlpack(weight)
    stop = Stop(job, 3)
    with wf.Engine("64MiB", device=FakeCudaDevice(), threads=1) as engine:
        handle = engine.submit(job)
        stop.suspend(handle)
        assert not _C.is_parked(weight)
        assert np.array_equal(array, weight.numpy())
        handle.resume()
        assert handle.result(300).state == "finished"
    assert_same_numbers(*expected("cnn", epochs=4), job, engine.report()["cnn"])
    assert np.array_equal(array, weight.numpy())


def test_without_page_locked_memory_it_rests_in_the_device_s(driver: FakeDriver) -> None:
    job = JOBS["cnn"](epochs=4)
    stop = Stop(job, 3)
    with wf.Engine("64MiB", device=FakeCudaDevice(), threads=1) as engine:
        handle = engine.submit(job)
        assert stop._reached.wait(300)
        for nth in range(1, 9):  # a batch may be on its way
            driver.fail("cuMemHostAlloc", nth, OUT_OF_MEMORY)
        stop.suspend(handle)
        driver.reset()
        driver.memory(2 << 30)
        assert not any(map(is_inside, tensors(job)))
        handle.resume()
        report = handle.result(300)
    if report.ok:
        assert_same_numbers(*expected("cnn", epochs=4), job, report)
    else:
        assert "cuMemHostAlloc" in str(report.error)


def test_turns_in_memory(driver: FakeDriver) -> None:
    """More jobs than fit: each has its turns, and the numbers of one that had all to itself."""
    with pytest.raises(wf.BudgetError) as caught:
        wf.run([JOBS["cnn"]()], "1KiB", device=FakeCudaDevice(), threads=1)
    need = int(str(caught.value).split("needs ")[1].split()[0])
    jobs = []
    for number in range(3):
        job = JOBS["cnn"](epochs=6)
        job.name = f"{number}"
        jobs.append(job)
    options = {"device": FakeCudaDevice(), "policy": "time-slice", "quantum": 0.05, "threads": 1}
    report = wf.run(jobs, need + need // 8, **options)
    whole, eager = expected("cnn", epochs=6)
    for job in jobs:
        assert report[job.name].losses == eager.losses
        assert differences(whole, job) == []


@pytest.mark.parametrize("rests", [False, True])
def test_a_checkpoint_of_a_job_that_spills_or_has_rested(
    rests: bool, driver: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies in page-locked memory is in it as what is on the device."""
    kept: list[JobSnapshot] = []
    monkeypatch.setattr(SnapshotWriter, "put", lambda _, snapshot: kept.append(snapshot))
    job = JOBS["cnn_shuffled"](epochs=4)
    if not rests:
        with pytest.raises(wf.BudgetError) as caught:
            wf.run([JOBS["cnn_shuffled"]()], "1KiB", device=FakeCudaDevice(), threads=1)
        job.memory_limit = int(int(str(caught.value).split("needs ")[1].split()[0]) * 0.6)
    driver.delay(100, seed=7)
    checkpoints = Checkpoints([job], tmp_path, "5 steps", None)
    options: dict[str, Any] = {"device": FakeCudaDevice(), "threads": 1}
    with checkpoints.written(), wf.Engine("64MiB", checkpoints=checkpoints, **options) as engine:
        if rests:
            stop = Stop(job, 3)
            handle = engine.submit(job)
            stop.suspend(handle)
            handle.resume()
        else:
            engine.submit(job)
    assert engine.report().ok
    monkeypatch.undo()
    CheckpointFolder(tmp_path).write(kept[0])
    resumed = JOBS["cnn_shuffled"](epochs=4)
    options["device"] = FakeCudaDevice()
    report = wf.run([resumed], "64MiB", resume=tmp_path, **options)
    whole, eager = expected("cnn_shuffled", epochs=4)
    assert report[resumed.name].resumed_steps == 5
    assert report[resumed.name].losses == eager.losses
    assert differences(whole, resumed) == []
