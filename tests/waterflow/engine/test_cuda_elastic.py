"""Elastic memory and priorities on a real GPU. The same is tested on the stand-in driver, in
`tests/fakecuda`; here it has to hold with real kernels, copies and PyTorch's own CUDA library."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import waterflow as wf
from tests.support.differences import assert_same_numbers
from tests.support.jobs import MODELS, OPTIMIZERS
from waterflow.allocator_ext import _C
from waterflow.engine.engine import Engine

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

JOBS = {**MODELS, **OPTIMIZERS}
NAMES = ["cnn", "encoder", "tied"]
MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


def on_gpu(name: str, **options: Any) -> wf.Job:
    """A job of the table, its model on the GPU."""
    job = JOBS[name](**options)
    job.model.to("cuda")  # the parameters stay the objects that the optimizer has
    return job


def expected(name: str, **options: Any) -> tuple[wf.Job, wf.JobReport]:
    job = on_gpu(name, **options)
    return job, wf.run_eager(job)


def need(name: str) -> int:
    with Engine("256MiB", device="cuda") as engine:
        run = engine.submit(on_gpu(name))._job
    return int(run.needs.memory.alone_bytes)


def outside(job: wf.Job) -> bool:
    """Whether none of the weights lies in the arena's memory."""
    return not any(_C.is_in_arena(p.untyped_storage().data_ptr()) for p in job.model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_spilling(name: str) -> None:
    limit, job = int(need(name) * 0.85), on_gpu(name)
    with Engine("256MiB", device="cuda", check=True) as engine:
        job.memory_limit = limit
        run = engine.submit(job)._job
    report = engine.report()
    assert_same_numbers(*expected(name), job, report[name])
    assert report[name].peak_bytes <= limit
    assert any(step.spill for step in run.steps.cache.steps())
    assert report.pinned_bytes > 0
    assert engine.check_races() == []


def test_a_parked_tensor_is_a_cuda_tensor_that_everybody_can_read() -> None:
    """Kernels, copies to the host and to the device, a product, and PyTorch's own saving."""
    device = _C.CudaDevice("libcuda.so.1", torch.cuda.current_device())
    streams = _C.LaneStreams(device, 1)
    arena = _C.Arena.cuda(streams, 64 * MIB, host_tensors=False)
    arena.commit()
    tensor = torch.arange(4096, dtype=torch.float32, device="cuda").reshape(64, 64)
    wanted, product = tensor.cpu(), (tensor @ tensor).cpu()
    _C.park([tensor], _C.PinnedBuffer(device, _C.parked_bytes([tensor])), arena)
    assert _C.is_parked(tensor)
    assert tensor.device.type == "cuda"
    assert torch.equal(tensor.cpu(), wanted)
    assert torch.equal(tensor.clone().cpu(), wanted)
    assert torch.equal((tensor @ tensor).cpu(), product)
    tensor.add_(1)
    assert torch.equal(tensor.cpu(), wanted + 1)
    _C.unpark(tensor, arena)
    assert not _C.is_parked(tensor)
    assert torch.equal(tensor.cpu(), wanted + 1)


@pytest.mark.parametrize("name", NAMES)
def test_suspend_and_resume(name: str) -> None:
    job, reached, goes_on = on_gpu(name, epochs=4), threading.Event(), threading.Event()

    def look(result: wf.StepResult) -> None:
        if result.step == 5:
            reached.set()
            assert goes_on.wait(300)

    job.on_step = look
    with wf.Engine("256MiB", device="cuda") as engine:
        handle = engine.submit(job)
        assert reached.wait(300)
        handle.suspend()
        goes_on.set()
        assert handle.suspend(timeout=300)
        assert engine._arena.held(0) == 0
        assert outside(job)
        assert all(torch.isfinite(p).all() for p in job.model.parameters())
        handle.resume()
        assert handle.result(300).state == "finished"
    assert_same_numbers(*expected(name, epochs=4), job, engine.report()[name])
    assert not any(_C.is_parked(p.data) for p in job.model.parameters())


def test_a_guaranteed_job_beside_another() -> None:
    first, other = on_gpu("cnn", epochs=4), on_gpu("encoder", epochs=4)
    first.priority, other.priority = "guaranteed", "opportunistic"
    report = wf.run([first, other], "256MiB", device="cuda")
    assert_same_numbers(*expected("cnn", epochs=4), first, report["cnn"])
    assert_same_numbers(*expected("encoder", epochs=4), other, report["encoder"])


def test_lanes_have_streams_of_two_priorities() -> None:
    device = _C.CudaDevice("libcuda.so.1", torch.cuda.current_device())
    streams = _C.LaneStreams(device, 2)
    assert streams.has_priorities
    assert streams.set_first(0, True)
    assert not streams.set_first(0, True)
    streams.join()
    assert streams.set_first(0, False)
    streams.drain()


def test_the_budget_shrinks_and_grows() -> None:
    job = on_gpu("cnn", epochs=200)
    with wf.Engine("1GiB", device="cuda") as engine:
        handle = engine.submit(job)
        while len(handle.losses) < 3:
            pass
        free = torch.cuda.mem_get_info()[0]
        engine.resize("256MiB")
        assert torch.cuda.mem_get_info()[0] - free >= 640 * MIB
        engine.resize("1GiB")
        assert torch.cuda.mem_get_info()[0] - free <= 128 * MIB
        handle.stop()
