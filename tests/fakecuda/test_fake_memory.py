"""Reservations, physical memory, mappings and host blocks of the fake driver."""

import ctypes
from pathlib import Path

import pytest

from tests.support.fake_cuda import Cuda, FakeDriver, allocation_on

pytestmark = pytest.mark.virtual

MIB = 1 << 20
GRANULE = 2 * MIB


def protection(address: int) -> str:
    """As the operating system sees it, e.g. `rw-s`."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, *_ = line.split()
        begin, end = (int(part, 16) for part in span.split("-"))
        if begin <= address < end:
            return permissions
    return "none"


def memory_info(cuda: Cuda) -> tuple[int, int]:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def output() -> object:
    return ctypes.byref(ctypes.c_uint64())


@pytest.fixture
def reserved(cuda: Cuda) -> int:
    """Four granules of addresses."""
    pointer = cuda.new("cuMemAddressReserve", 4 * GRANULE, 0, 0, 0)
    yield pointer
    cuda.cuMemAddressFree(pointer, 4 * GRANULE)


def test_granularity(cuda: Cuda) -> None:
    properties = ctypes.byref(allocation_on(0))
    assert cuda.new("cuMemGetAllocationGranularity", properties, 0) == GRANULE
    elsewhere = ctypes.byref(allocation_on(1))
    assert cuda.code("cuMemGetAllocationGranularity", output(), elsewhere, 0) == 101


def test_reservations(fake: FakeDriver, cuda: Cuda) -> None:
    pointer = cuda.new("cuMemAddressReserve", GRANULE, 16 * MIB, 0, 0)
    assert pointer % (16 * MIB) == 0
    assert protection(pointer) == protection(pointer + GRANULE - 1) == "---p"
    assert fake.live("reservations") == 1
    assert cuda.code("cuMemAddressReserve", output(), GRANULE + 4096, 0, 0, 0) == 1
    assert cuda.code("cuMemAddressReserve", output(), 0, 0, 0, 0) == 1
    assert cuda.code("cuMemAddressReserve", output(), GRANULE, 3, 0, 0) == 1
    assert cuda.code("cuMemAddressFree", pointer, 2 * GRANULE) == 1
    assert cuda.code("cuMemAddressFree", pointer + GRANULE, GRANULE) == 1
    cuda.cuMemAddressFree(pointer, GRANULE)
    assert cuda.code("cuMemAddressFree", pointer, GRANULE) == 1


def test_memory_is_counted_and_can_run_out(fake: FakeDriver, cuda: Cuda, context: int) -> None:
    fake.memory(3 * GRANULE)
    properties = ctypes.byref(allocation_on(0))
    first = cuda.create_memory(2 * GRANULE)
    assert memory_info(cuda) == (GRANULE, 3 * GRANULE)
    assert cuda.code("cuMemCreate", output(), 2 * GRANULE, properties, 0) == 2
    second = cuda.create_memory(GRANULE)
    assert (fake.live("handles"), fake.live("memory_bytes")) == (2, 3 * GRANULE)
    assert cuda.code("cuMemCreate", output(), GRANULE, properties, 0) == 2
    fake.memory(GRANULE)
    assert memory_info(cuda) == (0, GRANULE)
    cuda.cuMemRelease(first)
    cuda.cuMemRelease(second)
    assert cuda.code("cuMemRelease", first) == 1
    assert memory_info(cuda) == (GRANULE, GRANULE)


def test_creation_is_checked(fake: FakeDriver, cuda: Cuda) -> None:
    properties = allocation_on(0)
    assert cuda.code("cuMemCreate", output(), MIB, ctypes.byref(properties), 0) == 1
    assert cuda.code("cuMemCreate", output(), GRANULE, ctypes.byref(properties), 1) == 1
    assert cuda.code("cuMemCreate", output(), GRANULE, ctypes.byref(allocation_on(1)), 0) == 101
    properties.type = 0
    assert cuda.code("cuMemCreate", output(), GRANULE, ctypes.byref(properties), 0) == 1
    assert fake.live("memory_bytes") == 0


def test_each_device_has_its_memory(fake: FakeDriver, cuda: Cuda, reserved: int) -> None:
    fake.devices(2)
    fake.memory(GRANULE)
    handles = [cuda.create_memory(GRANULE, device) for device in (0, 1)]
    assert fake.live("memory_bytes") == 2 * GRANULE
    cuda.cuMemMap(reserved, GRANULE, 0, handles[1], 0)
    assert cuda.set_access(reserved, GRANULE, device=0) == 101
    assert cuda.set_access(reserved, GRANULE, device=1) == 0
    cuda.cuMemUnmap(reserved, GRANULE)
    for handle in handles:
        cuda.cuMemRelease(handle)


def test_mapping_is_checked(fake: FakeDriver, cuda: Cuda, reserved: int) -> None:
    handle = cuda.create_memory(2 * GRANULE)
    assert cuda.code("cuMemMap", reserved + 4096, GRANULE, 0, handle, 0) == 1
    assert cuda.code("cuMemMap", reserved, 4096, 0, handle, 0) == 1
    assert cuda.code("cuMemMap", reserved, 3 * GRANULE, 0, handle, 0) == 1, "larger than the memory"
    assert cuda.code("cuMemMap", reserved, GRANULE, GRANULE, handle, 0) == 1
    assert cuda.code("cuMemMap", reserved, GRANULE, 0, handle + 1, 0) == 1
    assert cuda.code("cuMemMap", reserved - GRANULE, 2 * GRANULE, 0, handle, 0) == 1
    assert cuda.code("cuMemMap", reserved + 3 * GRANULE, 2 * GRANULE, 0, handle, 0) == 1
    cuda.cuMemMap(reserved + GRANULE, 2 * GRANULE, 0, handle, 0)
    for overlapping in (0, 1, 2):
        code = cuda.code("cuMemMap", reserved + overlapping * GRANULE, 2 * GRANULE, 0, handle, 0)
        assert code == 1
    assert fake.live("mapped_bytes") == 2 * GRANULE
    assert cuda.code("cuMemAddressFree", reserved, 4 * GRANULE) == 1, "something is mapped in it"
    cuda.cuMemUnmap(reserved + GRANULE, 2 * GRANULE)
    cuda.cuMemRelease(handle)
    assert cuda.code("cuMemMap", reserved, GRANULE, 0, handle, 0) == 1, "released"


def test_access_follows_the_mappings(cuda: Cuda, reserved: int) -> None:
    handles = [cuda.create_memory(GRANULE) for _ in range(2)]
    for at, handle in enumerate(handles):
        cuda.cuMemMap(reserved + at * GRANULE, GRANULE, 0, handle, 0)
    assert protection(reserved) == "---s"
    assert cuda.set_access(reserved, 3 * GRANULE) == 1, "the third granule has no memory"
    assert cuda.set_access(reserved, MIB) == 1, "half a mapping"
    assert cuda.set_access(reserved, GRANULE, device=1) == 101
    assert cuda.set_access(reserved, GRANULE, flags=2) == 1
    assert cuda.set_access(reserved, 2 * GRANULE) == 0
    assert protection(reserved) == protection(reserved + 2 * GRANULE - 1) == "rw-s"
    cuda.cuMemUnmap(reserved, 2 * GRANULE)
    assert protection(reserved) == "---p"
    cuda.cuMemMap(reserved, GRANULE, 0, handles[0], 0)
    assert protection(reserved) == "---s", "a new mapping starts without access"
    cuda.cuMemUnmap(reserved, GRANULE)
    for handle in handles:
        cuda.cuMemRelease(handle)


def test_unmapping_cuts_no_mapping(fake: FakeDriver, cuda: Cuda, reserved: int) -> None:
    large, small = cuda.create_memory(2 * GRANULE), cuda.create_memory(GRANULE)
    cuda.cuMemMap(reserved, 2 * GRANULE, 0, large, 0)
    cuda.cuMemMap(reserved + 2 * GRANULE, GRANULE, 0, small, 0)
    assert cuda.code("cuMemUnmap", reserved, GRANULE) == 1
    assert cuda.code("cuMemUnmap", reserved + GRANULE, 2 * GRANULE) == 1
    assert cuda.code("cuMemUnmap", reserved, 4 * GRANULE) == 1, "the last granule is not mapped"
    assert cuda.code("cuMemUnmap", reserved, 0) == 1
    assert fake.live("mapped_bytes") == 3 * GRANULE
    cuda.cuMemUnmap(reserved, 3 * GRANULE)
    assert fake.live("mapped_bytes") == 0
    cuda.cuMemRelease(large)
    cuda.cuMemRelease(small)


@pytest.mark.parametrize("release_first", [True, False])
def test_memory_lives_as_long_as_handle_or_mapping(
    fake: FakeDriver, cuda: Cuda, reserved: int, release_first: bool
) -> None:
    handle = cuda.create_memory(GRANULE)
    cuda.cuMemMap(reserved, GRANULE, 0, handle, 0)
    steps = [lambda: cuda.cuMemRelease(handle), lambda: cuda.cuMemUnmap(reserved, GRANULE)]
    first, second = steps if release_first else steps[::-1]
    first()
    assert fake.live("memory_bytes") == GRANULE
    second()
    assert fake.live("memory_bytes") == 0


def test_memory_keeps_its_bytes_when_it_moves(cuda: Cuda, reserved: int) -> None:
    handle = cuda.create_memory(GRANULE)
    cuda.cuMemMap(reserved, GRANULE, 0, handle, 0)
    assert cuda.set_access(reserved, GRANULE) == 0
    ctypes.memset(reserved, 7, 100)
    cuda.cuMemUnmap(reserved, GRANULE)
    cuda.cuMemMap(reserved + GRANULE, GRANULE, 0, handle, 0)
    assert cuda.set_access(reserved + GRANULE, GRANULE) == 0
    assert ctypes.string_at(reserved + GRANULE, 100) == bytes([7]) * 100
    cuda.cuMemUnmap(reserved + GRANULE, GRANULE)
    cuda.cuMemRelease(handle)


def test_host_blocks(fake: FakeDriver, cuda: Cuda, context: int) -> None:
    block = cuda.new("cuMemHostAlloc", 100, 0)
    ctypes.memset(block, 1, 100)
    assert fake.live("host_blocks") == 1
    assert cuda.code("cuMemHostAlloc", output(), 0, 0) == 1
    assert cuda.code("cuMemFreeHost", block + 1) == 1
    cuda.cuMemFreeHost(block)
    assert cuda.code("cuMemFreeHost", block) == 1
