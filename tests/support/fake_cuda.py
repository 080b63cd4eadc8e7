"""The driver without a GPU: builds tests/fakecuda, sets its faults and sizes, and calls it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.programs import COMPILER, EXTENSION, ROOT, WARNINGS, require_compiler, succeed
from tests.support.tasks import Task

SOURCES = sorted((ROOT / "tests" / "fakecuda").glob("fake_*.cpp"))
HEADERS = [
    *sorted((ROOT / "tests" / "fakecuda").glob("*.h")),
    EXTENSION / "core" / "device" / "driver.h",
]
# Never unloaded: the threads of its streams run on after the last dlclose.
FLAGS = ["-std=c++17", "-O1", "-g1", "-pthread", "-fPIC", "-shared", "-Wl,-z,defs,-z,nodelete"]

LIVE = (
    "contexts",
    "pushed",
    "reservations",
    "handles",
    "mapped_bytes",
    "memory_bytes",
    "streams",
    "events",
    "host_blocks",
)


def _build() -> Path:
    require_compiler()
    command = [*COMPILER, *FLAGS, *WARNINGS, f"-I{EXTENSION}", *map(str, SOURCES)]
    content = b"".join(path.read_bytes() for path in [*SOURCES, *HEADERS])
    digest = hashlib.sha256(" ".join(command).encode() + content).hexdigest()[:16]
    built = ROOT / "build" / "fakecuda" / f"libfakecuda-{digest}.so"
    if not built.exists():
        built.parent.mkdir(parents=True, exist_ok=True)
        # Another test session may build it at the same time: each finishes its own file first.
        unfinished = built.with_suffix(f".{os.getpid()}")
        succeed(*command, "-o", unfinished)
        unfinished.replace(built)
    return built


#: The built driver. Its name has the hash of its sources, so an old one is never taken.
LIBRARY = Task("fake driver", _build)


def library() -> Path:
    return LIBRARY.result()


class FakeDriver:
    """The controls of a loaded fake driver, by default the one that the extension loads too."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or library()
        self.cdll = ctypes.CDLL(str(self.path))
        for query in ("fake_calls", "fake_live", "fake_busy", "fake_items"):
            getattr(self.cdll, query).restype = ctypes.c_longlong

    def fail(self, symbol: str, nth: int, code: int) -> None:
        """The `nth` call of the symbol from now on returns the code, once, and does nothing."""
        self._set("fake_fail", symbol.encode(), nth, code)

    def sticky(self, code: int) -> None:
        """The context is lost: every call returns the code until `reset`."""
        self._set("fake_sticky", code)

    def break_after(self, work_items: int, code: int) -> None:
        """The context is lost once the streams have executed so many more work items."""
        self._set("fake_break_after", work_items, code)

    def delay(self, max_microseconds: int, seed: int = 0) -> None:
        """Every work item waits a random time before it is executed."""
        self._set("fake_set_delay", max_microseconds, seed)

    def hold(self, on: bool = True) -> None:
        """Streams begin no work item while they are held."""
        self._set("fake_hold", int(on))

    def memory(self, total_bytes: int) -> None:
        self._set("fake_set_memory", ctypes.c_size_t(total_bytes))

    def devices(self, count: int) -> None:
        self._set("fake_set_devices", count)

    def attribute(self, number: int, value: int) -> None:
        """What cuDeviceGetAttribute answers, on every device."""
        self._set("fake_set_attribute", number, value)

    def priorities(self, least: int, greatest: int) -> None:
        """The range of streams' priorities; the greatest has the lowest number."""
        self._set("fake_set_priorities", least, greatest)

    def items(self, priority: int) -> int:
        """Work items that were queued since `reset` on streams of a priority."""
        return self.cdll.fake_items(priority)

    def ignore_waits(self, on: bool = True) -> None:
        """Waits on events do nothing: a test of the order must fail now."""
        self._set("fake_ignore_waits", int(on))

    def calls(self, symbol: str) -> int:
        """Calls since `reset`, refused ones too."""
        return self._get("fake_calls", symbol)

    def live(self, kind: str) -> int:
        return self._get("fake_live", kind)

    def live_objects(self) -> dict[str, int]:
        return {kind: self.live(kind) for kind in LIVE}

    def busy(self) -> int:
        """Work items that are queued or under way."""
        return self.cdll.fake_busy()

    def reset(self) -> None:
        """Clears faults, counters and settings; objects that are live stay."""
        self.cdll.fake_reset()

    def _set(self, function: str, *arguments: object) -> None:
        if getattr(self.cdll, function)(*arguments) != 0:
            raise ValueError(f"{function}{arguments}: no such symbol, or a number out of range")

    def _get(self, function: str, name: str) -> int:
        count = getattr(self.cdll, function)(name.encode())
        if count < 0:
            raise ValueError(f"{function}: the driver knows no {name}")
        return count


@contextlib.contextmanager
def nothing_left(driver: FakeDriver) -> Iterator[None]:
    """What is live afterwards and was not before fails, once the streams have had time to end."""
    if any(driver.live_objects().values()):
        gc.collect()  # only then: beside all of torch each one takes half a second
    before = driver.live_objects()

    def left() -> dict[str, int]:
        after = driver.live_objects()
        return {kind: after[kind] - before[kind] for kind in after if after[kind] > before[kind]}

    yield
    driver.reset()
    deadline = time.monotonic() + 60
    while left() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert not left(), left()


@contextlib.contextmanager
def driver_with(memory_bytes: int) -> Iterator[FakeDriver]:
    """The driver that the extension loads, with so much memory; what is left in it fails."""
    driver = FakeDriver()
    driver.reset()
    with nothing_left(driver):
        # Beside what engines have that tests before have left, held by whatever pytest still keeps.
        driver.memory(memory_bytes + driver.live("memory_bytes"))
        yield driver
    driver.reset()


class Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class AllocationProperties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32_meta_data", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class AccessDescription(ctypes.Structure):
    _fields_ = (("location", Location), ("flags", ctypes.c_int))


def allocation_on(device: int) -> AllocationProperties:
    return AllocationProperties(type=1, location=Location(1, device))


class Cuda:
    """Calls by ctypes: `cuda.cuInit(0)` raises unless it succeeds, `cuda.code("cuInit", 0)` tells.

    `cuda.new("cuStreamCreate", 0)` passes an output before the arguments and returns its value.
    """

    def __init__(self, driver: FakeDriver) -> None:
        self.cdll = driver.cdll

    def code(self, symbol: str, *arguments: object) -> int:
        wide = [ctypes.c_uint64(each) if isinstance(each, int) else each for each in arguments]
        return getattr(self.cdll, symbol)(*wide)

    def __getattr__(self, symbol: str) -> Callable[..., None]:
        def call(*arguments: object) -> None:
            code = self.code(symbol, *arguments)
            assert code == 0, f"{symbol} returned {code}"

        return call

    def new(self, symbol: str, *arguments: object) -> int:
        output = ctypes.c_uint64()
        getattr(self, symbol)(ctypes.byref(output), *arguments)
        return output.value

    def create_memory(self, size: int, device: int = 0) -> int:
        return self.new("cuMemCreate", size, ctypes.byref(allocation_on(device)), 0)

    def set_access(self, pointer: int, size: int, device: int = 0, flags: int = 3) -> int:
        description = AccessDescription(Location(1, device), flags)
        return self.code("cuMemSetAccess", pointer, size, ctypes.byref(description), 1)

    def map_memory(self, size: int) -> tuple[int, int]:
        """Memory at an address of its own, ready for copies: the address and the handle."""
        pointer = self.new("cuMemAddressReserve", size, 0, 0, 0)
        handle = self.create_memory(size)
        self.cuMemMap(pointer, size, 0, handle, 0)
        assert self.set_access(pointer, size) == 0
        return pointer, handle

    def unmap_memory(self, pointer: int, handle: int, size: int) -> None:
        self.cuMemUnmap(pointer, size)
        self.cuMemRelease(handle)
        self.cuMemAddressFree(pointer, size)
