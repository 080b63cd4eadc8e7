"""Devices, contexts, errors and faults of the fake driver, and its controls."""

import ctypes
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.fake_cuda import Cuda, FakeDriver

pytestmark = pytest.mark.virtual

MIB = 1 << 20
GRANULE = 2 * MIB

CALLS_THAT_NEED_A_CONTEXT = (
    "cuCtxSynchronize",
    "cuMemGetInfo_v2",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemcpyAsync",
    "cuCtxGetStreamPriorityRange",
    "cuStreamCreate",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuEventElapsedTime",
    "cuLaunchHostFunc",
)
NAMES = {
    0: "CUDA_SUCCESS",
    1: "CUDA_ERROR_INVALID_VALUE",
    2: "CUDA_ERROR_OUT_OF_MEMORY",
    3: "CUDA_ERROR_NOT_INITIALIZED",
    100: "CUDA_ERROR_NO_DEVICE",
    101: "CUDA_ERROR_INVALID_DEVICE",
    201: "CUDA_ERROR_INVALID_CONTEXT",
    400: "CUDA_ERROR_INVALID_HANDLE",
    600: "CUDA_ERROR_NOT_READY",
    700: "CUDA_ERROR_ILLEGAL_ADDRESS",
    719: "CUDA_ERROR_LAUNCH_FAILED",
    999: "CUDA_ERROR_UNKNOWN",
}


def text_of(cuda: Cuda, symbol: str, code: int) -> tuple[int, str | None]:
    output = ctypes.c_char_p(b"untouched")
    result = cuda.code(symbol, code, ctypes.byref(output))
    return result, None if output.value is None else output.value.decode()


def in_thread(body: Callable[[], None]) -> None:
    thread = threading.Thread(target=body)
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive()


def test_nothing_works_before_init(make_driver: Callable[[], FakeDriver]) -> None:
    cuda = Cuda(make_driver())
    assert cuda.code("cuDeviceGetCount", ctypes.byref(ctypes.c_int())) == 3
    assert cuda.code("cuCtxSynchronize") == 3
    assert cuda.code("cuMemRelease", 0) == 3
    assert cuda.new("cuDriverGetVersion") == 13000
    assert cuda.code("cuInit", 1) == 1
    cuda.cuInit(0)
    assert cuda.new("cuDeviceGetCount") == 1


def test_no_device_no_init(make_driver: Callable[[], FakeDriver]) -> None:
    driver = make_driver()
    driver.devices(0)
    assert Cuda(driver).code("cuInit", 0) == 100


def test_one_library_is_one_driver(fake: FakeDriver) -> None:
    same = FakeDriver(fake.path)
    Cuda(same).new("cuDeviceGetCount")
    assert fake.calls("cuDeviceGetCount") == 1


def test_devices(fake: FakeDriver, cuda: Cuda) -> None:
    fake.devices(2)
    assert cuda.new("cuDeviceGetCount") == 2
    assert cuda.new("cuDeviceGet", 1) == 1
    assert cuda.code("cuDeviceGet", ctypes.byref(ctypes.c_int()), 2) == 101
    name = ctypes.create_string_buffer(32)
    cuda.cuDeviceGetName(name, len(name), 1)
    assert name.value == b"Fake GPU 1"
    cuda.cuDeviceGetName(name, 5, 0)
    assert name.value == b"Fake"
    assert cuda.code("cuDeviceGetName", name, 5, 2) == 101
    assert cuda.new("cuDeviceGetAttribute", 102, 1) == 1
    fake.attribute(102, 0)
    assert cuda.new("cuDeviceGetAttribute", 102, 1) == 0
    assert cuda.code("cuDevicePrimaryCtxRetain", ctypes.byref(ctypes.c_void_p()), 2) == 101


def test_contexts_are_counted(fake: FakeDriver, cuda: Cuda) -> None:
    assert cuda.code("cuDevicePrimaryCtxRelease_v2", 0) == 201
    context = cuda.new("cuDevicePrimaryCtxRetain", 0)
    assert cuda.new("cuDevicePrimaryCtxRetain", 0) == context
    assert fake.live("contexts") == 2
    cuda.cuDevicePrimaryCtxRelease_v2(0)
    cuda.cuCtxPushCurrent_v2(context)
    cuda.cuCtxSynchronize()
    cuda.cuDevicePrimaryCtxRelease_v2(0)
    assert cuda.code("cuCtxSynchronize") == 709, "the context is gone, though current"
    assert cuda.code("cuCtxPushCurrent_v2", context) == 201
    cuda.new("cuCtxPopCurrent_v2")
    assert cuda.code("cuCtxPushCurrent_v2", 0) == 201


def test_current_context_is_the_threads_own(fake: FakeDriver, cuda: Cuda, context: int) -> None:
    codes = []

    def other_thread() -> None:
        codes.append(cuda.code("cuCtxSynchronize"))
        cuda.cuCtxPushCurrent_v2(context)
        codes.append(fake.live("pushed"))
        codes.append(cuda.code("cuCtxSynchronize"))
        codes.append(cuda.new("cuCtxPopCurrent_v2"))

    in_thread(other_thread)
    assert codes == [201, 2, 0, context]
    assert fake.live("pushed") == 1


def test_contexts_are_a_stack(fake: FakeDriver, cuda: Cuda, context: int) -> None:
    fake.devices(2)
    other = cuda.new("cuDevicePrimaryCtxRetain", 1)
    cuda.cuCtxPushCurrent_v2(other)
    cuda.cuDevicePrimaryCtxRelease_v2(1)
    assert cuda.code("cuCtxSynchronize") == 709
    assert cuda.new("cuCtxPopCurrent_v2") == other
    cuda.cuCtxSynchronize()
    assert cuda.new("cuCtxPopCurrent_v2") == context
    assert cuda.code("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p())) == 201
    cuda.cuCtxPushCurrent_v2(context)


@pytest.mark.parametrize("symbol", CALLS_THAT_NEED_A_CONTEXT)
def test_calls_need_a_current_context(cuda: Cuda, symbol: str) -> None:
    assert cuda.code(symbol, 0, 0, 0, 0) == 201


def test_names_of_errors(fake: FakeDriver, cuda: Cuda) -> None:
    for code, name in NAMES.items():
        assert text_of(cuda, "cuGetErrorName", code) == (0, name)
        result, text = text_of(cuda, "cuGetErrorString", code)
        assert result == 0
        assert text
    assert text_of(cuda, "cuGetErrorName", 12345) == (1, None)
    assert text_of(cuda, "cuGetErrorString", 12345) == (1, None)
    fake.sticky(700)
    assert text_of(cuda, "cuGetErrorName", 700) == (0, NAMES[700])


def test_nth_call_fails_once_and_does_nothing(fake: FakeDriver, cuda: Cuda) -> None:
    cuda.new("cuDeviceGetCount")
    fake.fail("cuDeviceGetCount", 2, 999)
    fake.fail("cuDeviceGetCount", 3, 2)
    output = ctypes.byref(ctypes.c_int())
    assert [cuda.code("cuDeviceGetCount", output) for _ in range(4)] == [0, 999, 2, 0]
    fake.fail("cuDevicePrimaryCtxRetain", 1, 2)
    assert cuda.code("cuDevicePrimaryCtxRetain", output, 0) == 2
    assert fake.live("contexts") == 0
    assert fake.calls("cuDeviceGetCount") == 5


def test_sticky_until_reset(fake: FakeDriver, cuda: Cuda, context: int) -> None:
    fake.sticky(719)
    assert cuda.code("cuInit", 0) == 719
    assert cuda.code("cuCtxSynchronize") == 719
    assert cuda.code("cuMemAddressReserve", 0, GRANULE, 0, 0, 0) == 719
    assert cuda.code("cuCtxPushCurrent_v2", context) == 719
    assert fake.live("pushed") == 1
    assert cuda.code("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p())) == 719
    assert fake.live("pushed") == 0, "a thread must not keep a lost context"
    fake.reset()
    cuda.cuCtxPushCurrent_v2(context)
    cuda.cuCtxSynchronize()


def test_reset_clears_settings(fake: FakeDriver, cuda: Cuda, context: int) -> None:
    fake.fail("cuDeviceGetCount", 1, 2)
    fake.devices(3)
    fake.memory(64 * MIB)
    fake.reset()
    assert fake.calls("cuDeviceGetCount") == 0
    assert cuda.new("cuDeviceGetCount") == 1
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
    assert (free.value, total.value) == (256 * MIB, 256 * MIB)


def test_controls_refuse_what_means_nothing(fake: FakeDriver) -> None:
    with pytest.raises(ValueError, match="cuMemMapp"):
        fake.fail("cuMemMapp", 1, 2)
    with pytest.raises(ValueError, match="out of range"):
        fake.fail("cuMemMap", 0, 2)
    with pytest.raises(ValueError, match="out of range"):
        fake.break_after(0, 700)
    with pytest.raises(ValueError, match="out of range"):
        fake.devices(17)
    with pytest.raises(ValueError, match="cuMalloc"):
        fake.calls("cuMalloc")
    with pytest.raises(ValueError, match="threads"):
        fake.live("threads")


WORK_AT_EXIT = """
import ctypes, sys
cuda = ctypes.CDLL(sys.argv[1])
cuda.cuInit(0)
context, stream, event = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
cuda.cuCtxPushCurrent_v2(context)
cuda.cuStreamCreate(ctypes.byref(stream), 0)
cuda.cuEventCreate(ctypes.byref(event), 0)
cuda.fake_set_delay(100_000_000, 1)
for _ in range(10):
    cuda.cuEventRecord(event, stream)
    cuda.cuStreamWaitEvent(None, event, 0)
assert cuda.fake_busy() == 20
"""


def test_work_at_exit_is_dropped(fake: FakeDriver) -> None:
    command = [sys.executable, "-c", WORK_AT_EXIT, str(fake.path)]
    subprocess.run(command, check=True, timeout=250)


def test_every_symbol_is_counted(fake: FakeDriver) -> None:
    header = Path(__file__).parents[2] / "allocator_ext" / "core" / "device" / "driver.h"
    listed = [line for line in header.read_text().splitlines() if line.startswith("  CALL(")]
    symbols = [line.split("(")[1].split(",")[0].split(")")[0] for line in listed]
    assert len(symbols) == len(set(symbols)) >= 30
    assert all(fake.calls(symbol) == 0 for symbol in symbols)
