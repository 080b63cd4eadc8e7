"""Device, streams, arena and staging on the fake driver: what they do, and what they leave when
a call fails."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.support.fake_cuda import FakeDriver
from waterflow.allocator_ext import _C

pytestmark = pytest.mark.fakecuda

MIB = 1 << 20
PAGE = 2 * MIB
PIECE = 64 * MIB  # what the arena takes at once
TOTAL = 1 << 30  # of the device
INVALID_VALUE, OUT_OF_MEMORY, ILLEGAL_ADDRESS = 1, 2, 700

Failure = tuple[str, int]  # the call, and which one of it


@pytest.fixture
def driver(fake: FakeDriver, request: pytest.FixtureRequest) -> Iterator[FakeDriver]:
    """Whatever a test leaves behind fails the test."""
    fake.memory(TOTAL)
    yield fake
    fake.reset()
    request.node.funcargs.clear()  # pytest would keep what other fixtures have made
    gc.collect()


@pytest.fixture
def device(driver: FakeDriver) -> _C.CudaDevice:
    return _C.CudaDevice(str(driver.path), 0)


@pytest.fixture
def streams(device: _C.CudaDevice) -> _C.LaneStreams:
    return _C.LaneStreams(device, 2)


def make_arena(streams: _C.LaneStreams, capacity: int) -> _C.Arena:
    return _C.Arena.cuda(streams, capacity, host_tensors=True)


def bytes_at(pointer: int, size: int) -> torch.Tensor:
    """Memory of the fake device is the host's."""
    return torch.frombuffer((ctypes.c_ubyte * size).from_address(pointer), dtype=torch.uint8)


def expect_refusal(driver: FakeDriver, symbol: str, nth: int, call: Callable[[], object]) -> None:
    """The call reports the driver's, and gives back what it has taken."""
    before = driver.live_objects()
    driver.fail(symbol, nth, INVALID_VALUE)
    with pytest.raises(_C.BackendError) as caught:
        call()
    assert re.match(rf"the CUDA call {symbol} failed to .*_INVALID_VALUE", str(caught.value))
    assert driver.live_objects() == before


# The device


def test_a_device(driver: FakeDriver, device: _C.CudaDevice) -> None:
    assert (device.index, device.name, device.driver_version) == (0, "Fake GPU 0", 13000)
    assert device.memory() == (TOTAL, TOTAL)
    assert device.failure() == ""
    assert driver.live_objects()["contexts"] == 1
    assert driver.live_objects()["pushed"] == 0


def test_the_second_of_two_devices(driver: FakeDriver) -> None:
    driver.devices(2)
    device = _C.CudaDevice(str(driver.path), 1)
    assert (device.index, device.name) == (1, "Fake GPU 1")


def test_a_library_that_is_not_there() -> None:
    with pytest.raises(_C.BackendError, match=r"libnone\.so cannot be loaded.*or run on the CPU"):
        _C.CudaDevice("libnone.so", 0)


def test_a_library_that_is_no_driver() -> None:
    with pytest.raises(_C.BackendError, match=r"libc\.so\.6 has no cuInit.*update"):
        _C.CudaDevice("libc.so.6", 0)


@pytest.mark.parametrize("index", [-1, 1, 1 << 30])
def test_a_device_that_is_not_there(driver: FakeDriver, index: int) -> None:
    with pytest.raises(_C.BackendError, match=f"no CUDA device {index}: this machine has 1, count"):
        _C.CudaDevice(str(driver.path), index)


def test_a_machine_without_devices(driver: FakeDriver) -> None:
    driver.devices(0)
    with pytest.raises(_C.BackendError, match=r"cuInit failed to init.*CUDA_ERROR_NO_DEVICE"):
        _C.CudaDevice(str(driver.path), 0)


def test_a_device_without_virtual_memory(driver: FakeDriver) -> None:
    driver.attribute(102, 0)
    with pytest.raises(_C.BackendError, match=r"Fake GPU 0.*no virtual memory management"):
        _C.CudaDevice(str(driver.path), 0)


@pytest.mark.parametrize(
    "symbol",
    [
        "cuInit",
        "cuDriverGetVersion",
        "cuDeviceGetCount",
        "cuDeviceGet",
        "cuDeviceGetName",
        "cuDeviceGetAttribute",
        "cuDevicePrimaryCtxRetain",
    ],
)
def test_opening_fails(driver: FakeDriver, symbol: str) -> None:
    expect_refusal(driver, symbol, 1, lambda: _C.CudaDevice(str(driver.path), 0))
    assert _C.CudaDevice(str(driver.path), 0).failure() == ""


@pytest.mark.parametrize("symbol", ["cuCtxPushCurrent_v2", "cuMemGetInfo_v2"])
def test_asking_for_memory_fails(driver: FakeDriver, device: _C.CudaDevice, symbol: str) -> None:
    expect_refusal(driver, symbol, 1, device.memory)
    assert device.memory() == (TOTAL, TOTAL)


def test_an_error_without_a_name(driver: FakeDriver, device: _C.CudaDevice) -> None:
    driver.fail("cuMemGetInfo_v2", 1, 12345)
    with pytest.raises(_C.BackendError, match=r"CUDA error 12345 \(no description\)"):
        device.memory()


def test_a_lost_context(make_driver: Callable[[], FakeDriver]) -> None:
    """All calls say what has happened, and objects go without a word."""
    driver = make_driver()
    device = _C.CudaDevice(str(driver.path), 0)
    streams = _C.LaneStreams(device, 2)
    arena = make_arena(streams, PAGE)
    arena.commit()
    buffer = _C.PinnedBuffer(device, 64)
    driver.sticky(ILLEGAL_ADDRESS)
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in device.failure()
    for call in (device.synchronize, device.memory, streams.join, streams.drain, buffer.wait,
                 arena.synchronize, arena.finish):  # fmt: skip
        with pytest.raises(_C.BackendError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
            call()
    del arena, buffer, streams, device, call
    gc.collect()


# Streams


def test_a_join_makes_the_lanes_wait_for_each_other(
    driver: FakeDriver, streams: _C.LaneStreams
) -> None:
    """A lane's mark after the join is reached: so is every mark of the other one before it."""
    device = _C.LaneDevice.cuda(streams, True)
    driver.delay(300, seed=1)
    for lane in (0, 1) * 8:
        before = [device.mark(lane) for _ in range(4)]
        streams.join()
        after = device.mark(1 - lane)
        device.wait(after)
        times = [device.seconds(mark) for mark in [*before, after]]
        assert times == sorted(times)


def test_without_waits_the_test_above_would_fail(
    driver: FakeDriver, streams: _C.LaneStreams
) -> None:
    device = _C.LaneDevice.cuda(streams, True)
    driver.delay(1000, seed=1)
    driver.ignore_waits()
    with pytest.raises(_C.BackendError, match="CUDA_ERROR_NOT_READY"):  # noqa: PT012
        for _ in range(50):
            before = [device.mark(0) for _ in range(4)]
            streams.join()
            device.wait(device.mark(1))
            for mark in before:
                device.seconds(mark)


def test_a_join_does_not_stop_the_host(driver: FakeDriver, streams: _C.LaneStreams) -> None:
    driver.delay(200_000, seed=2)
    for _ in range(10):
        streams.join()
    assert driver.busy() > 20
    driver.delay(0)
    streams.drain()
    assert driver.busy() == 0


def test_one_lane_needs_no_join(driver: FakeDriver, device: _C.CudaDevice) -> None:
    _C.LaneStreams(device, 1).join()
    assert driver.calls("cuEventRecord") == 0


@pytest.mark.parametrize(
    "failure",
    [
        ("cuCtxGetStreamPriorityRange", 1),
        ("cuStreamCreateWithPriority", 1),
        ("cuStreamCreateWithPriority", 4),
        ("cuEventCreate", 2),
    ],
)
def test_making_streams_fails(driver: FakeDriver, device: _C.CudaDevice, failure: Failure) -> None:
    expect_refusal(driver, *failure, lambda: _C.LaneStreams(device, 3))


@pytest.mark.parametrize(
    "failure", [("cuEventRecord", 2), ("cuStreamWaitEvent", 1), ("cuCtxPushCurrent_v2", 3)]
)
def test_a_join_fails(driver: FakeDriver, streams: _C.LaneStreams, failure: Failure) -> None:
    expect_refusal(driver, *failure, streams.join)
    streams.join()
    streams.drain()


def test_lasting_streams_are_used_again(make_driver: Callable[[], FakeDriver]) -> None:
    """PyTorch asks streams that it was given long after their lanes have gone."""
    driver = make_driver()
    device = _C.CudaDevice(str(driver.path), 0)
    destroyed = driver.calls("cuStreamDestroy_v2")
    first = _C.LaneStreams(device, 2, lasting=True)
    first.set_first(1, True)
    del first
    assert driver.calls("cuStreamDestroy_v2") == destroyed
    made = driver.calls("cuStreamCreateWithPriority")
    again = _C.LaneStreams(device, 2, lasting=True)
    assert driver.calls("cuStreamCreateWithPriority") == made
    more = _C.LaneStreams(device, 2, lasting=True)
    assert driver.calls("cuStreamCreateWithPriority") == made + 4
    for streams in (again, more):
        streams.join()
        streams.drain()


def test_other_streams_go_with_their_lanes(driver: FakeDriver, device: _C.CudaDevice) -> None:
    destroyed = driver.calls("cuStreamDestroy_v2")
    streams = _C.LaneStreams(device, 2)
    del streams
    assert driver.calls("cuStreamDestroy_v2") == destroyed + 4


# The arena's memory


def test_memory_is_taken_at_commit(driver: FakeDriver, streams: _C.LaneStreams) -> None:
    arena = make_arena(streams, 2 * PIECE + PAGE + 5000)
    assert driver.live("reservations") == 1
    assert (arena.statistics().taken, driver.live("memory_bytes")) == (0, 0)
    arena.commit()
    assert arena.statistics().capacity == 2 * PIECE + PAGE + 4608, "whole units of 512 bytes"
    assert arena.statistics().taken == driver.live("mapped_bytes") == 2 * PIECE + 2 * PAGE
    assert driver.live("handles") == 3
    arena.commit()
    assert driver.live("memory_bytes") == 2 * PIECE + 2 * PAGE
    del arena
    assert driver.live("memory_bytes") == driver.live("reservations") == 0


def test_a_wait_that_fails_still_leaves_nothing_queued(
    driver: FakeDriver, streams: _C.LaneStreams
) -> None:
    """Whoever waits lets go of memory next, be it because of the error."""
    before = driver.calls("cuStreamSynchronize")
    driver.fail("cuStreamSynchronize", 1, INVALID_VALUE)
    with pytest.raises(RuntimeError, match="cuStreamSynchronize"):
        streams.drain()
    assert driver.calls("cuStreamSynchronize") - before == streams.lanes + 1


def test_memory_can_be_written_from_end_to_end(streams: _C.LaneStreams) -> None:
    arena = make_arena(streams, PIECE + PAGE)
    arena.commit()
    pointer = arena.allocate(PIECE + PAGE, 0, 0)
    border = bytes_at(pointer + PIECE - 8, 16)
    border.fill_(7)
    bytes_at(pointer + PIECE + PAGE - 1, 1).fill_(1)
    assert border.tolist() == [7] * 16


def test_the_arena_grows_and_shrinks_in_place(driver: FakeDriver, streams: _C.LaneStreams) -> None:
    arena = make_arena(streams, PAGE)
    arena.commit()
    pointer = arena.allocate(1000, 0, 0)
    bytes_at(pointer, 1000).fill_(5)
    for capacity, taken in [
        (10 * MIB, 10 * MIB),
        (200 * MIB, 200 * MIB),
        (PAGE + 512, 10 * MIB),  # the piece that the end lies in stays
        (9 * MIB, 10 * MIB),
        (PAGE, PAGE),
        (1 * MIB, PAGE),
    ]:
        assert arena.resize(capacity)
        now = arena.statistics()
        assert (now.capacity, now.taken) == (capacity, taken)
        assert driver.live("memory_bytes") == driver.live("mapped_bytes") == taken
        assert arena.pointer_to(0) == pointer
        assert arena.owns(pointer + capacity - 1)
        assert not arena.owns(pointer + capacity)
    assert bytes_at(pointer, 1000).tolist() == [5] * 1000
    assert not arena.resize(512), "a block lies there"
    assert not arena.resize(TOTAL + PAGE), "there are no more addresses"
    assert arena.statistics().capacity == 1 * MIB


def test_resizing_before_the_commit_takes_nothing(
    driver: FakeDriver, streams: _C.LaneStreams
) -> None:
    arena = make_arena(streams, PAGE)
    assert arena.resize(6 * MIB)
    assert arena.resize(4 * MIB)
    assert driver.live("memory_bytes") == 0
    arena.commit()
    assert arena.statistics().taken == 4 * MIB


def test_an_arena_larger_than_its_device(driver: FakeDriver, streams: _C.LaneStreams) -> None:
    arena = make_arena(streams, TOTAL + 100 * MIB)
    with pytest.raises(_C.BackendError, match="choose a smaller budget"):
        arena.commit()
    driver.memory(TOTAL + 100 * MIB)
    assert driver.live("memory_bytes") == 0
    arena.commit()
    assert driver.live("memory_bytes") == TOTAL + 100 * MIB


def test_requests_make_the_arena_grow(driver: FakeDriver, streams: _C.LaneStreams) -> None:
    arena = make_arena(streams, 512)
    arena.commit()
    assert arena.allocate(4 * MIB, 0, 0) is None
    arena.set_growth(16 * MIB)
    first = arena.allocate(4 * MIB, 0, 0)
    assert arena.statistics().taken == 18 * MIB, "a step, in whole pages"
    second = arena.allocate(100 * MIB, 0, 0)
    assert arena.statistics().taken >= 104 * MIB, "more than a step where one does not do"
    for pointer, size in [(first, 4 * MIB), (second, 100 * MIB)]:
        bytes_at(pointer + size - 1, 1).fill_(1)
    assert arena.allocate(TOTAL, 0, 0) is None
    arena.set_growth(0)
    assert arena.allocate(100 * MIB, 0, 0) is None
    assert driver.live("memory_bytes") == arena.statistics().taken


def test_growth_takes_less_than_a_step_where_that_is_all(
    driver: FakeDriver, streams: _C.LaneStreams
) -> None:
    driver.memory(20 * MIB)
    arena = make_arena(streams, PAGE)
    arena.commit()
    arena.set_growth(100 * MIB)
    assert arena.allocate(8 * MIB, 0, 0) is not None
    assert arena.statistics().taken == 10 * MIB
    assert arena.allocate(12 * MIB, 0, 0) is None


def test_giving_back(driver: FakeDriver, streams: _C.LaneStreams) -> None:
    arena = make_arena(streams, 3 * PIECE)
    arena.commit()
    low = arena.allocate(1000, 0, 0)
    middle = arena.allocate(PIECE, 0, 0)
    high = arena.allocate(PIECE, 0, 0)
    bytes_at(low, 1000).fill_(3)
    arena.free(high, 0)
    arena.give_back()
    assert arena.statistics().taken == driver.live("memory_bytes") == 2 * PIECE
    arena.free(middle, 0)
    arena.give_back()
    assert arena.statistics().taken == driver.live("memory_bytes") == PIECE
    assert bytes_at(low, 1000).tolist() == [3] * 1000
    arena.free(low, 0)
    arena.give_back()
    assert arena.statistics().taken == driver.live("memory_bytes") == 0
    arena.commit()
    assert arena.statistics().taken == 3 * PIECE


def test_out_of_memory_names_what_there_is_and_what_to_do(
    driver: FakeDriver, streams: _C.LaneStreams
) -> None:
    driver.memory(160 * MIB)
    neighbour = make_arena(streams, 32 * MIB)
    neighbour.commit()
    arena = make_arena(streams, 150 * MIB)
    with pytest.raises(_C.BackendError) as caught:
        arena.commit()
    assert str(caught.value) == (
        f"CUDA device 0 (Fake GPU 0) has {128 * MIB} of {160 * MIB} bytes free, the arena needs "
        f"{150 * MIB} more; choose a smaller budget or free memory on the device"
    )
    assert driver.live("memory_bytes") == 32 * MIB
    del neighbour
    arena.commit()


@pytest.mark.parametrize("symbol", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
@pytest.mark.parametrize("piece", [1, 2, 4])
def test_a_commit_fails(
    driver: FakeDriver, streams: _C.LaneStreams, symbol: str, piece: int
) -> None:
    arena = make_arena(streams, 3 * PIECE + PAGE)
    expect_refusal(driver, symbol, piece, arena.commit)
    assert arena.statistics().taken == 0
    arena.commit()
    pointer = arena.allocate(3 * PIECE + PAGE, 0, 0)
    bytes_at(pointer + 3 * PIECE, PAGE).fill_(1)


@pytest.mark.parametrize("symbol", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
@pytest.mark.parametrize("piece", [1, 3])
@pytest.mark.parametrize("code", [INVALID_VALUE, OUT_OF_MEMORY])
def test_growth_fails(
    driver: FakeDriver, streams: _C.LaneStreams, symbol: str, piece: int, code: int
) -> None:
    """The arena is as before: what lies in it, how large it is, what it has taken."""
    arena = make_arena(streams, PAGE)
    arena.commit()
    pointer = arena.allocate(PAGE, 0, 0)
    bytes_at(pointer, PAGE).fill_(9)
    before = driver.live_objects()
    driver.fail(symbol, piece, code)
    assert not arena.resize(3 * PIECE)
    assert driver.live_objects() == before
    assert arena.statistics().capacity == arena.statistics().taken == PAGE
    assert not arena.owns(pointer + PAGE)
    assert arena.allocate(512, 0, 0) is None
    assert bytes_at(pointer, PAGE).min() == bytes_at(pointer, PAGE).max() == 9
    assert arena.resize(3 * PIECE)
    bytes_at(arena.allocate(PIECE, 0, 0), PIECE).fill_(1)
    arena.snapshot().check_consistency()


def test_growth_on_request_fails(driver: FakeDriver, streams: _C.LaneStreams) -> None:
    """Once for the step and once for the bare request; then the request is refused."""
    arena = make_arena(streams, PAGE)
    arena.commit()
    arena.set_growth(PIECE)
    driver.fail("cuMemMap", 1, INVALID_VALUE)
    driver.fail("cuMemMap", 2, INVALID_VALUE)
    assert arena.allocate(2 * PAGE, 0, 0) is None
    assert arena.statistics().taken == driver.live("memory_bytes") == PAGE
    assert arena.allocate(2 * PAGE, 0, 0) is not None
    assert arena.statistics().taken == PAGE + PIECE


@pytest.mark.parametrize("symbol", ["cuMemUnmap", "cuCtxSynchronize", "cuCtxPushCurrent_v2"])
def test_shrinking_fails(driver: FakeDriver, streams: _C.LaneStreams, symbol: str) -> None:
    """Told or not, the arena still has the memory that its size promises."""
    arena = make_arena(streams, PAGE)
    arena.commit()
    assert arena.resize(3 * PAGE)
    driver.fail(symbol, 1, INVALID_VALUE)
    with contextlib.suppress(_C.BackendError):
        assert not arena.resize(PAGE)
    assert arena.statistics().capacity == arena.statistics().taken == 3 * PAGE
    assert arena.owns(arena.pointer_to(3 * PAGE - 1))
    bytes_at(arena.allocate(3 * PAGE, 0, 0), 3 * PAGE).fill_(1)


@pytest.mark.parametrize(
    "symbol", ["cuMemGetAllocationGranularity", "cuMemGetInfo_v2", "cuMemAddressReserve"]
)
def test_reserving_fails(driver: FakeDriver, streams: _C.LaneStreams, symbol: str) -> None:
    expect_refusal(driver, symbol, 1, lambda: make_arena(streams, PAGE))


@pytest.mark.parametrize("lanes", [0, -1])
def test_streams_without_lanes_have_no_arena(
    driver: FakeDriver, device: _C.CudaDevice, lanes: int
) -> None:
    streams = _C.LaneStreams(device, lanes)
    with pytest.raises(ValueError, match="lanes"):
        make_arena(streams, PAGE)
    assert driver.live("reservations") == 0


# Batches


@pytest.fixture
def copies(device: _C.CudaDevice) -> _C.CudaStream:
    return _C.CudaStream(device)


@pytest.fixture
def block(streams: _C.LaneStreams) -> Iterator[torch.Tensor]:
    """Device memory for a batch; copies into it end before it goes."""
    arena = make_arena(streams, PAGE)
    arena.commit()
    yield bytes_at(arena.allocate(MIB, 0, 0), MIB)
    arena.finish()


def test_a_batch_arrives(
    driver: FakeDriver, device: _C.CudaDevice, copies: _C.CudaStream, block: torch.Tensor
) -> None:
    driver.delay(2000, seed=4)
    device_input, buffer = _C.DeviceInput(copies, device), _C.PinnedBuffer(device, MIB)
    assert buffer.tensor().shape == (MIB,)
    for value in range(1, 6):
        buffer.tensor().fill_(value)
        device_input.send(buffer, block, MIB // 2)
        buffer.wait()
        assert block[: MIB // 2].eq(value).all()
    assert block[MIB // 2 :].eq(0).all(), "no more than was sent"


def test_batches_arrive_in_order(
    driver: FakeDriver, device: _C.CudaDevice, copies: _C.CudaStream, block: torch.Tensor
) -> None:
    driver.delay(2000, seed=5)
    device_input = _C.DeviceInput(copies, device)
    buffers = [_C.PinnedBuffer(device, 64) for _ in range(8)]
    for value, buffer in enumerate(buffers):
        buffer.tensor().fill_(value)
        device_input.send(buffer, block[value * 32 :], 64)
    copies.wait()
    assert block[: 9 * 32].reshape(9, 32)[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 7]


def test_a_buffer_waits_for_its_own_copies_only(
    driver: FakeDriver, device: _C.CudaDevice, copies: _C.CudaStream, block: torch.Tensor
) -> None:
    first, second = _C.PinnedBuffer(device, 64), _C.PinnedBuffer(device, 64)
    device_input = _C.DeviceInput(copies, device)
    second.wait()  # nothing was sent
    device_input.send(first, block, 64)
    copies.wait()
    driver.hold()
    device_input.send(second, block, 64)
    waits = [threading.Thread(target=buffer.wait) for buffer in (first, second)]
    for thread in waits:
        thread.start()
    waits[0].join(60)
    still_waiting = [thread.is_alive() for thread in waits]
    driver.hold(False)
    for thread in waits:
        thread.join()
    assert still_waiting == [False, True]
    assert driver.busy() == 0


def test_what_a_copy_reads_lives_as_long(
    driver: FakeDriver, device: _C.CudaDevice, copies: _C.CudaStream, block: torch.Tensor
) -> None:
    """The buffer's end waits for the copy; the tensor keeps the buffer."""
    driver.delay(20_000, seed=6)
    device_input, buffer = _C.DeviceInput(copies, device), _C.PinnedBuffer(device, 64)
    bytes_ = buffer.tensor()
    bytes_.fill_(6)
    device_input.send(buffer, block, 64)
    del buffer, device_input
    gc.collect()
    assert driver.live("host_blocks") == 1
    del bytes_
    assert driver.live("host_blocks") == 0
    assert block[:64].eq(6).all()


def test_the_arena_keeps_memory_that_a_copy_still_writes(
    driver: FakeDriver, device: _C.CudaDevice, streams: _C.LaneStreams, copies: _C.CudaStream
) -> None:
    """Or the copy would find no memory and break the context."""
    driver.delay(20_000, seed=7)
    device_input, buffer = _C.DeviceInput(copies, device), _C.PinnedBuffer(device, 64)
    arena = make_arena(streams, PAGE)
    arena.commit()
    assert arena.resize(2 * PAGE)
    device_input.send(buffer, bytes_at(arena.pointer_to(PAGE), 64), 64)
    assert arena.resize(PAGE)
    assert driver.live("memory_bytes") == PAGE
    device_input.send(buffer, bytes_at(arena.pointer_to(0), 64), 64)
    arena.give_back()
    assert driver.live("memory_bytes") == 0
    arena.commit()
    device_input.send(buffer, bytes_at(arena.pointer_to(0), 64), 64)
    del arena
    assert device.failure() == ""


@pytest.mark.parametrize("failure", [("cuMemHostAlloc", 1), ("cuEventCreate", 1)])
def test_a_buffer_fails(driver: FakeDriver, device: _C.CudaDevice, failure: Failure) -> None:
    expect_refusal(driver, *failure, lambda: _C.PinnedBuffer(device, 64))


def test_an_empty_buffer_is_refused(device: _C.CudaDevice) -> None:
    with pytest.raises(_C.BackendError, match="page-locked host memory"):
        _C.PinnedBuffer(device, 0)


@pytest.mark.parametrize("failure", [("cuEventCreate", 1), ("cuEventCreate", 2)])
def test_a_device_input_fails(
    driver: FakeDriver, device: _C.CudaDevice, copies: _C.CudaStream, failure: Failure
) -> None:
    expect_refusal(driver, *failure, lambda: _C.DeviceInput(copies, device))


def test_a_stream_fails(driver: FakeDriver, device: _C.CudaDevice) -> None:
    expect_refusal(driver, "cuStreamCreate", 1, lambda: _C.CudaStream(device))


@pytest.mark.parametrize(
    "failure", [("cuStreamWaitEvent", 1), ("cuMemcpyAsync", 1), ("cuEventRecord", 2)]
)
def test_sending_fails(
    driver: FakeDriver,
    device: _C.CudaDevice,
    copies: _C.CudaStream,
    block: torch.Tensor,
    failure: Failure,
) -> None:
    device_input, buffer = _C.DeviceInput(copies, device), _C.PinnedBuffer(device, 64)
    buffer.tensor().fill_(1)
    expect_refusal(driver, *failure, lambda: device_input.send(buffer, block, 64))
    device_input.send(buffer, block, 64)
    buffer.wait()
    assert block[:64].eq(1).all()


def test_a_buffer_is_released_even_where_waiting_fails(
    make_driver: Callable[[], FakeDriver],
) -> None:
    driver = make_driver()
    buffer = _C.PinnedBuffer(_C.CudaDevice(str(driver.path), 0), 64)
    driver.fail("cuEventSynchronize", 1, INVALID_VALUE)
    del buffer
    assert not any(driver.live_objects().values())


# Times


def test_marks_tell_the_time(driver: FakeDriver, streams: _C.LaneStreams) -> None:
    """Of the steady clock, which is the one of time.monotonic, in seconds."""
    device = _C.LaneDevice.cuda(streams, True)
    for lane in (0, 1, 0, 1):
        time.sleep(0.02)  # twenty seconds off where milliseconds are taken for seconds
        earliest = time.monotonic()
        mark = device.mark(lane)
        device.wait(mark)
        assert earliest - 5 < device.seconds(mark) < time.monotonic() + 5


def test_marks_of_a_lane_are_in_order(driver: FakeDriver, streams: _C.LaneStreams) -> None:
    driver.delay(500, seed=8)
    device = _C.LaneDevice.cuda(streams, True)
    marks = [[device.mark(lane) for _ in range(30)] for lane in (0, 1)]
    for lane in (0, 1):
        device.wait(marks[lane][-1])
        times = [device.seconds(mark) for mark in marks[lane]]
        assert times == sorted(times)
        assert times[0] < times[-1]


def test_a_mark_that_is_not_reached_has_no_time(
    driver: FakeDriver, streams: _C.LaneStreams
) -> None:
    device = _C.LaneDevice.cuda(streams, True)
    driver.hold()
    mark = device.mark(0)
    with pytest.raises(_C.BackendError, match="CUDA_ERROR_NOT_READY"):
        device.seconds(mark)
    driver.hold(False)
    device.wait(mark)


def test_events_of_marks_are_used_again(driver: FakeDriver, streams: _C.LaneStreams) -> None:
    device = _C.LaneDevice.cuda(streams, True)
    before = driver.live("events")
    for _ in range(50):
        device.wait(device.mark(0))
    assert driver.live("events") <= before + 2
    kept = [device.mark(0) for _ in range(10)]
    streams.drain()
    assert len({device.seconds(mark) for mark in kept}) == 10


@pytest.mark.parametrize("symbol", ["cuEventCreate", "cuEventRecord", "cuEventSynchronize"])
def test_a_lane_device_fails(driver: FakeDriver, streams: _C.LaneStreams, symbol: str) -> None:
    expect_refusal(driver, symbol, 1, lambda: _C.LaneDevice.cuda(streams, True))
    device = _C.LaneDevice.cuda(streams, True)
    driver.fail("cuEventRecord", 1, INVALID_VALUE)
    with pytest.raises(_C.BackendError, match="cuEventRecord"):
        device.mark(0)
    device.wait(device.mark(0))


def test_the_host_as_a_lane_device() -> None:
    device = _C.LaneDevice()
    marks = [device.mark(0) for _ in range(3)]
    device.wait(marks[0])
    assert abs(device.seconds(marks[0]) - time.monotonic()) < 60
    assert device.seconds(marks[0]) <= device.seconds(marks[2])
