"""Streams, events and copies of the fake driver, and what breaks while they work."""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.support.fake_cuda import Cuda, FakeDriver
from tests.support.waiting import wait_until

pytestmark = pytest.mark.virtual

SIZE = 2 << 20
BYTES = 64
HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Streams:
    """A test's streams, events, memory and host functions, released at its end."""

    def __init__(self, fake: FakeDriver, cuda: Cuda) -> None:
        self.fake = fake
        self.cuda = cuda
        self.functions: list[object] = []  # kept alive: the streams hold bare pointers
        self.gates: list[threading.Event] = []
        self.streams: list[int] = []
        self.events: list[int] = []
        self.pointer, self.handle = cuda.map_memory(SIZE)

    def stream(self) -> int:
        self.streams.append(self.cuda.new("cuStreamCreate", 1))
        return self.streams[-1]

    def event(self, flags: int = 0) -> int:
        self.events.append(self.cuda.new("cuEventCreate", flags))
        return self.events[-1]

    def call(self, stream: int, body: Callable[[], object]) -> None:
        self.functions.append(HOST_FUNCTION(lambda _: body() and None))
        self.cuda.cuLaunchHostFunc(stream, self.functions[-1], 0)

    def gate(self, stream: int) -> threading.Event:
        """The stream goes on only once the gate is set."""
        gate = threading.Event()
        self.gates.append(gate)
        self.call(stream, lambda: gate.wait(300))
        return gate

    def to_device(self, at: int, source: ctypes.Array, stream: int) -> None:
        self.cuda.cuMemcpyAsync(self.pointer + at, source, BYTES, stream)

    def to_host(self, target: ctypes.Array, at: int, stream: int) -> None:
        self.cuda.cuMemcpyAsync(target, self.pointer + at, BYTES, stream)

    def close(self) -> None:
        for gate in self.gates:
            gate.set()
        self.fake.reset()
        for stream in self.streams:
            self.cuda.cuStreamDestroy_v2(stream)
        for event in self.events:
            self.cuda.cuEventDestroy_v2(event)
        self.cuda.cuCtxSynchronize()
        self.cuda.unmap_memory(self.pointer, self.handle, SIZE)


@pytest.fixture
def work(fake: FakeDriver, cuda: Cuda, context: int) -> Iterator[Streams]:
    streams = Streams(fake, cuda)
    yield streams
    streams.close()


def filled(value: int) -> ctypes.Array:
    return (ctypes.c_ubyte * BYTES)(*[value] * BYTES)


def test_copies_there_and_back(cuda: Cuda, work: Streams) -> None:
    stream = work.stream()
    source, target = filled(5), filled(0)
    work.to_device(0, source, stream)
    cuda.cuMemcpyAsync(work.pointer + 4096, work.pointer, BYTES, stream)
    work.to_host(target, 4096, stream)
    cuda.cuStreamSynchronize(stream)
    assert bytes(target) == bytes(source)


def test_copies_are_checked(cuda: Cuda, work: Streams) -> None:
    stream, buffer = work.stream(), filled(0)
    end = work.pointer + SIZE
    assert cuda.code("cuMemcpyAsync", end - BYTES + 1, buffer, BYTES, stream) == 1
    assert cuda.code("cuMemcpyAsync", buffer, end - 1, BYTES, stream) == 1
    assert cuda.code("cuMemcpyAsync", buffer, work.pointer, BYTES, stream + 1) == 400
    overlapping = (work.pointer, work.pointer + 1, BYTES, stream)
    assert cuda.code("cuMemcpyAsync", *overlapping) == 1
    cuda.cuMemcpyAsync(end, buffer, 0, stream)
    assert cuda.set_access(work.pointer, SIZE, flags=1) == 0, "to read only"
    assert cuda.code("cuMemcpyAsync", work.pointer, buffer, BYTES, stream) == 1
    cuda.cuMemcpyAsync(buffer, work.pointer, BYTES, stream)
    cuda.cuStreamSynchronize(stream)
    assert cuda.set_access(work.pointer, SIZE, flags=0) == 0
    assert cuda.code("cuMemcpyAsync", buffer, work.pointer, BYTES, stream) == 1


def test_copies_span_mappings_but_no_gap(cuda: Cuda, work: Streams) -> None:
    stream, buffer = work.stream(), (ctypes.c_ubyte * (2 * BYTES))(*range(2 * BYTES))
    base = cuda.new("cuMemAddressReserve", 3 * SIZE, 0, 0, 0)
    for at in (0, 1):
        handle = cuda.create_memory(SIZE)
        cuda.cuMemMap(base + at * SIZE, SIZE, 0, handle, 0)
        cuda.cuMemRelease(handle)
    assert cuda.set_access(base, 2 * SIZE) == 0
    border, end = base + SIZE - BYTES, base + 2 * SIZE
    cuda.cuMemcpyAsync(border, buffer, 2 * BYTES, stream)
    cuda.cuStreamSynchronize(stream)
    assert ctypes.string_at(border, 2 * BYTES) == bytes(buffer)
    assert cuda.code("cuMemcpyAsync", end - BYTES, buffer, 2 * BYTES, stream) == 1
    for beyond in (end, end + BYTES):
        assert cuda.code("cuMemcpyAsync", beyond, buffer, BYTES, stream) == 1
    cuda.cuMemUnmap(base, 2 * SIZE)
    cuda.cuMemAddressFree(base, 3 * SIZE)


def test_a_copy_reads_its_source_when_it_runs(cuda: Cuda, work: Streams) -> None:
    stream = work.stream()
    source, target = filled(1), filled(0)
    gate = work.gate(stream)
    work.to_device(0, source, stream)
    work.to_host(target, 0, stream)
    source[:] = filled(2)[:]
    assert target[0] == 0, "nothing may run before the gate opens"
    gate.set()
    cuda.cuStreamSynchronize(stream)
    assert bytes(target) == bytes(filled(2))


def test_streams_are_in_order_and_beside_each_other(cuda: Cuda, work: Streams) -> None:
    slow, quick = work.stream(), work.stream()
    order: list[str] = []
    gate = work.gate(slow)
    work.call(slow, lambda: order.append("slow 1"))
    work.call(slow, lambda: order.append("slow 2"))
    work.call(quick, lambda: order.append("quick"))
    cuda.cuStreamSynchronize(quick)
    assert order == ["quick"]
    gate.set()
    cuda.cuCtxSynchronize()
    assert order == ["quick", "slow 1", "slow 2"]


@pytest.mark.parametrize("ignored", [False, True])
def test_a_wait_orders_two_streams(
    fake: FakeDriver, cuda: Cuda, work: Streams, ignored: bool
) -> None:
    fake.ignore_waits(ignored)
    writer, reader, event = work.stream(), work.stream(), work.event()
    source, target = filled(9), filled(0)
    gate = work.gate(writer)
    work.to_device(0, source, writer)
    cuda.cuEventRecord(event, writer)
    cuda.cuStreamWaitEvent(reader, event, 0)
    work.to_host(target, 0, reader)
    if ignored:
        cuda.cuStreamSynchronize(reader)
        assert target[0] == 0, "without the wait the reader comes too early"
        return
    time.sleep(0.01)
    assert fake.busy() == 5
    gate.set()
    cuda.cuStreamSynchronize(reader)
    assert target[0] == 9


def relay(cuda: Cuda, work: Streams, hops: int) -> list[int]:
    """Numbers that the streams append in turn, each after the other's event."""
    streams, order = [work.stream(), work.stream()], []
    for hop in range(hops):
        event = work.event(2)
        work.call(streams[hop % 2], lambda hop=hop: order.append(hop))
        cuda.cuEventRecord(event, streams[hop % 2])
        cuda.cuStreamWaitEvent(streams[1 - hop % 2], event, 0)
    cuda.cuCtxSynchronize()
    return order


def test_waits_hold_under_delays(fake: FakeDriver, cuda: Cuda, work: Streams) -> None:
    fake.delay(500, seed=3)
    assert relay(cuda, work, 100) == list(range(100))


def test_ignored_waits_show_under_delays(fake: FakeDriver, cuda: Cuda, work: Streams) -> None:
    fake.delay(500, seed=3)
    fake.ignore_waits()
    order = relay(cuda, work, 100)
    assert sorted(order) == list(range(100))
    assert order != sorted(order)


def test_a_wait_is_for_the_record_at_its_call(cuda: Cuda, work: Streams) -> None:
    first, second, waiting = work.stream(), work.stream(), work.stream()
    event = work.event()
    cuda.cuEventRecord(event, first)
    cuda.cuStreamWaitEvent(waiting, event, 0)
    gate = work.gate(second)
    cuda.cuEventRecord(event, second)
    cuda.cuStreamSynchronize(waiting)
    assert cuda.code("cuEventQuery", event) == 600, "the event itself is the later record"
    gate.set()
    cuda.cuEventSynchronize(event)
    assert cuda.code("cuEventQuery", event) == 0


def test_an_event_that_was_never_recorded_is_done(cuda: Cuda, work: Streams) -> None:
    stream, event = work.stream(), work.event()
    cuda.cuStreamWaitEvent(stream, event, 0)
    cuda.cuStreamSynchronize(stream)
    cuda.cuEventSynchronize(event)
    assert cuda.code("cuEventQuery", event) == 0


def test_elapsed_time(cuda: Cuda, work: Streams) -> None:
    stream = work.stream()
    start, end, untimed = work.event(), work.event(), work.event(2)
    elapsed = ctypes.c_float()
    assert cuda.code("cuEventElapsedTime", ctypes.byref(elapsed), start, end) == 400
    began = time.monotonic()
    cuda.cuEventRecord(start, stream)
    cuda.cuEventSynchronize(start)
    gate = work.gate(stream)
    cuda.cuEventRecord(end, stream)
    cuda.cuEventRecord(untimed, stream)
    assert cuda.code("cuEventElapsedTime", ctypes.byref(elapsed), start, end) == 600
    time.sleep(0.02)
    gate.set()
    cuda.cuStreamSynchronize(stream)
    assert cuda.code("cuEventElapsedTime", ctypes.byref(elapsed), start, untimed) == 400
    cuda.cuEventElapsedTime(ctypes.byref(elapsed), start, end)
    waited = time.monotonic() - began
    assert 20 <= elapsed.value <= 1000 * waited
    cuda.cuEventElapsedTime(ctypes.byref(elapsed), end, start)
    assert elapsed.value <= -20


def test_a_destroyed_stream_finishes_its_work(fake: FakeDriver, cuda: Cuda, work: Streams) -> None:
    stream, target = cuda.new("cuStreamCreate", 1), filled(0)
    gate = work.gate(stream)
    work.to_device(0, source := filled(4), stream)
    work.to_host(target, 0, stream)
    cuda.cuStreamDestroy_v2(stream)
    assert (fake.live("streams"), fake.busy()) == (0, 3)
    assert cuda.code("cuStreamSynchronize", stream) == 400
    gate.set()
    cuda.cuCtxSynchronize()
    assert bytes(target) == bytes(source)


def test_a_destroyed_event_still_ends_its_waits(cuda: Cuda, work: Streams) -> None:
    writer, reader = work.stream(), work.stream()
    gate, order = work.gate(writer), []
    work.call(writer, lambda: order.append("writer"))
    event = cuda.new("cuEventCreate", 0)
    cuda.cuEventRecord(event, writer)
    cuda.cuStreamWaitEvent(reader, event, 0)
    cuda.cuEventDestroy_v2(event)
    work.call(reader, lambda: order.append("reader"))
    assert cuda.code("cuEventQuery", event) == 400
    gate.set()
    cuda.cuStreamSynchronize(reader)
    assert order == ["writer", "reader"]


def test_the_default_stream_is_a_stream(cuda: Cuda, work: Streams) -> None:
    source, target = filled(6), filled(0)
    work.to_device(0, source, 0)
    work.to_host(target, 0, 0)
    cuda.cuStreamSynchronize(0)
    assert bytes(target) == bytes(source)
    assert cuda.code("cuStreamDestroy_v2", 0) == 400


def test_host_functions_must_not_call_the_driver(cuda: Cuda, work: Streams) -> None:
    stream, codes = work.stream(), []
    work.call(stream, lambda: codes.append(cuda.code("cuCtxSynchronize")))
    cuda.cuStreamSynchronize(stream)
    assert codes == [800]


def test_events_and_streams_of_one_device(fake: FakeDriver, cuda: Cuda, work: Streams) -> None:
    fake.devices(2)
    stream = work.stream()
    cuda.cuCtxPushCurrent_v2(cuda.new("cuDevicePrimaryCtxRetain", 1))
    elsewhere = cuda.new("cuEventCreate", 0)
    assert cuda.code("cuEventRecord", elsewhere, stream) == 400
    cuda.cuEventDestroy_v2(elsewhere)
    cuda.new("cuCtxPopCurrent_v2")
    cuda.cuDevicePrimaryCtxRelease_v2(1)


def test_a_new_context_does_not_know_old_handles(make_driver: Callable[[], FakeDriver]) -> None:
    driver = make_driver()
    cuda = Cuda(driver)
    cuda.cuInit(0)
    context = cuda.new("cuDevicePrimaryCtxRetain", 0)
    cuda.cuCtxPushCurrent_v2(context)
    stream = cuda.new("cuStreamCreate", 1)
    cuda.cuDevicePrimaryCtxRelease_v2(0)
    assert cuda.new("cuDevicePrimaryCtxRetain", 0) == context
    assert cuda.code("cuStreamSynchronize", stream) == 400
    assert driver.live("streams") == 1, "it was never destroyed: a leak, and shown as one"


def test_unmapping_under_a_copy_breaks_the_context(cuda: Cuda, work: Streams) -> None:
    stream, target = work.stream(), filled(0)
    gate = work.gate(stream)
    work.to_host(target, 0, stream)
    cuda.cuMemUnmap(work.pointer, SIZE)
    gate.set()
    assert cuda.code("cuStreamSynchronize", stream) == 700
    assert cuda.code("cuDeviceGetCount", ctypes.byref(ctypes.c_int())) == 700
    work.fake.reset()
    cuda.cuMemMap(work.pointer, SIZE, 0, work.handle, 0)


def test_break_after_some_work(fake: FakeDriver, cuda: Cuda, work: Streams) -> None:
    stream, done = work.stream(), []
    fake.break_after(3, 719)
    gate = work.gate(stream)
    for number in range(5):
        work.call(stream, lambda number=number: done.append(number))
    gate.set()
    assert cuda.code("cuStreamSynchronize", stream) == 719
    assert done == [0, 1]
    assert cuda.code("cuCtxSynchronize") == 719
    fake.reset()
    cuda.cuStreamSynchronize(stream)
    assert done == [0, 1], "what was dropped does not come back"


def test_reset_cancels_plans(fake: FakeDriver, cuda: Cuda, work: Streams) -> None:
    stream, done = work.stream(), []
    fake.delay(30_000_000, seed=1)  # the second item's would be 29.9 s
    fake.break_after(1, 719)
    fake.reset()
    work.call(stream, lambda: done.append(time.monotonic()))
    work.call(stream, lambda: done.append(time.monotonic()))
    cuda.cuStreamSynchronize(stream)
    assert done[1] - done[0] < 15


@pytest.mark.parametrize("blocking", ["stream", "event", "context"])
def test_a_break_wakes_who_is_blocked(
    fake: FakeDriver, cuda: Cuda, work: Streams, context: int, blocking: str
) -> None:
    stream, event, codes = work.stream(), work.event(), []
    gate = work.gate(stream)
    cuda.cuEventRecord(event, stream)
    symbol, *arguments = {
        "stream": ("cuStreamSynchronize", stream),
        "event": ("cuEventSynchronize", event),
        "context": ("cuCtxSynchronize",),
    }[blocking]

    def block() -> None:
        cuda.cuCtxPushCurrent_v2(context)
        codes.append(cuda.code(symbol, *arguments))
        codes.append(cuda.code("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p())))

    thread = threading.Thread(target=block)
    thread.start()
    wait_until(lambda: fake.calls(symbol) > 0)
    fake.sticky(700)
    thread.join(timeout=60)
    assert codes == [700, 700]
    assert not gate.is_set()
    fake.reset()
    assert cuda.code("cuEventQuery", event) == 0, "nobody waits for a record that was dropped"


def test_a_refused_copy_is_not_made(fake: FakeDriver, cuda: Cuda, work: Streams) -> None:
    stream, target = work.stream(), filled(3)
    fake.fail("cuMemcpyAsync", 1, 999)
    assert cuda.code("cuMemcpyAsync", target, work.pointer, BYTES, stream) == 999
    cuda.cuStreamSynchronize(stream)
    assert target[0] == 3


def test_a_host_block_is_freed_after_its_copies(cuda: Cuda, work: Streams) -> None:
    stream, order = work.stream(), []
    block = cuda.new("cuMemHostAlloc", BYTES, 0)
    work.call(stream, lambda: time.sleep(0.02))
    cuda.cuMemcpyAsync(work.pointer, block, BYTES, stream)
    work.call(stream, lambda: order.append("copied"))
    cuda.cuMemFreeHost(block)
    assert order == ["copied"]
