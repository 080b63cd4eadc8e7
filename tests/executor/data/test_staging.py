"""Batches on their way to a device whose copies come late: what arrives is what was packed."""

import pytest
import torch

from tests.support.fake_cuda import FakeDriver, nothing_left
from tests.support.fake_device import FakeCudaDevice
from waterflow.executor.data.staging import BatchPrefetcher
from waterflow.executor.device.host import HostDevice
from waterflow.executor.run.lanes import Lanes
from waterflow.executor.run.residency import Residency
from waterflow.executor.run.threads import available_cpus, pin_here

BUDGET = 4 << 20


@pytest.fixture
def driver(request):
    """Whatever a test leaves behind fails the test."""
    found = FakeDriver()
    found.reset()
    found.memory(1 << 30)
    with nothing_left(found):
        found.delay(3000, seed=2)
        yield found
        request.node.funcargs.clear()  # pytest would keep what other fixtures have made


@pytest.fixture
def lanes(driver):
    before, threads = available_cpus(), torch.get_num_threads()
    made = Lanes(FakeCudaDevice(), BUDGET, 1, 1, 1)
    made.adopt_lane(0)
    made.commit()
    yield made
    made.close()
    pin_here(before)
    torch.set_num_threads(threads)


def delivered(prefetcher, tensors):
    """Packs a batch, sends it and waits for its copy."""
    pinned = prefetcher.pack(tensors)
    prefetcher.send(pinned)
    found = prefetcher.receive(pinned)
    pinned.buffer.wait()
    return [tensor.clone(memory_format=torch.preserve_format) for tensor in found], pinned


@pytest.mark.fakecuda
def test_batches_arrive_with_their_values_types_and_strides(lanes):
    x = torch.arange(96.0).reshape(4, 3, 8)
    tensors = [x[:, 0, ::2], x.transpose(0, 2)[::2, 1], torch.arange(5), x[:0], x[0, 0, :4] > 2]
    prefetcher, residency = BatchPrefetcher(lanes.device), Residency(lanes.arena, lanes.device)
    prefetcher.pack(tensors)
    prefetcher.open(3, lanes.scope, residency)
    pinned = prefetcher.pack(tensors)
    prefetcher.send(pinned)
    found = prefetcher.receive(pinned)
    pinned.buffer.wait()
    for one, other in zip(found, tensors, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
        assert one.dtype == other.dtype
        assert one.numel() == 0 or lanes.arena.owns(one.data_ptr())
    del found, one
    prefetcher.close(residency)


@pytest.mark.fakecuda
def test_the_device_input_is_counted_and_grows_between_steps(lanes):
    prefetcher, residency = BatchPrefetcher(lanes.device), Residency(lanes.arena, lanes.device)
    small, large = [torch.ones(100)], [torch.ones(1000)]
    first = prefetcher.pack(small)
    assert not prefetcher.fits(first), "it is not open yet"
    prefetcher.open(3, lanes.scope, residency)
    assert lanes.arena.held(3) == 512
    assert prefetcher.fits(first)
    second = prefetcher.pack(large)
    assert not prefetcher.fits(second)
    prefetcher.open(3, lanes.scope, residency)
    assert prefetcher.fits(second)
    assert lanes.arena.held(3) == 4096
    prefetcher.open(3, lanes.scope, residency)  # as large as it has to be
    assert lanes.arena.held(3) == 4096
    prefetcher.close(residency)
    assert lanes.arena.held(3) == 0


@pytest.mark.fakecuda
def test_buffers_are_used_again_once_their_copies_are_done(lanes):
    prefetcher, residency = BatchPrefetcher(lanes.device), Residency(lanes.arena, lanes.device)
    prefetcher.pack([torch.ones(100)])
    prefetcher.open(3, lanes.scope, residency)
    buffers = set()
    for value in range(6):
        (found,), pinned = delivered(prefetcher, [torch.full((100,), float(value))])
        buffers.add(id(pinned.buffer))
        assert found.eq(value).all()
    assert len(buffers) == 1
    prefetcher.close(residency)


@pytest.mark.fakecuda
def test_a_batch_is_sent_once(lanes):
    prefetcher, residency = BatchPrefetcher(lanes.device), Residency(lanes.arena, lanes.device)
    pinned = prefetcher.pack([torch.ones(10)])
    prefetcher.open(3, lanes.scope, residency)
    prefetcher.send(pinned)
    assert pinned.sent
    copies = FakeDriver().calls("cuMemcpyAsync")
    prefetcher.send(pinned)
    assert FakeDriver().calls("cuMemcpyAsync") == copies
    empty = prefetcher.pack([torch.empty(0)])
    prefetcher.send(empty)
    assert not empty.sent
    pinned.buffer.wait()
    prefetcher.close(residency)


@pytest.mark.cpu
def test_the_host_has_no_device_input():
    assert BatchPrefetcher(HostDevice()).device_input is None
