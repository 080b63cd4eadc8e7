// Threads at once in every part of the fake driver, for the sanitizers: maps, copies, waits,
// faults. Each round sends a pattern through device memory and two streams and back, so a lost
// order or a shared byte shows as wrong data too.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "fake_driver.h"

extern "C" {
int fake_set_delay(int max_microseconds, unsigned seed);
int fake_break_after(int work_items, int code);
long long fake_live(const char* kind);
long long fake_busy();
void fake_reset();
}

namespace {

constexpr std::size_t kBytes = 64 * 1024;
constexpr std::size_t kMapped = 2 * fake::kGranularity;
constexpr int kThreads = 4;

void expect(bool holds, const char* sentence) {
  if (holds) return;
  std::fprintf(stderr, "hammer: %s\n", sentence);
  std::_Exit(1);
}

void ok(cu::Result result) { expect(result == cu::kSuccess, "a call failed"); }

// A context that is current for the life of the object.
struct Current {
  Current() {
    ok(cuDevicePrimaryCtxRetain(&context, 0));
    ok(cuCtxPushCurrent_v2(context));
  }
  ~Current() {
    ok(cuCtxPopCurrent_v2(&context));
    ok(cuDevicePrimaryCtxRelease_v2(0));
  }
  cu::Context context;
};

struct Mapped {
  Mapped() {
    const cu::Location device{cu::kLocationDevice, 0};
    const cu::AllocationProperties properties{cu::kAllocationPinned, 0, device, nullptr, {}};
    const cu::AccessDescription access{device, cu::kAccessReadWrite};
    ok(cuMemAddressReserve(&pointer, kMapped, 0, 0, 0));
    ok(cuMemCreate(&handle, kMapped, &properties, 0));
    ok(cuMemMap(pointer, kMapped, 0, handle, 0));
    ok(cuMemSetAccess(pointer, kMapped, &access, 1));
  }
  ~Mapped() {
    ok(cuMemUnmap(pointer, kMapped));
    ok(cuMemRelease(handle));
    ok(cuMemAddressFree(pointer, kMapped));
  }
  cu::DevicePointer pointer = 0;
  cu::MemoryHandle handle = 0;
};

struct Lanes {
  Lanes() {
    for (cu::Stream* stream : {&first, &second}) ok(cuStreamCreate(stream, cu::kStreamNonBlocking));
    ok(cuEventCreate(&event, cu::kEventDisableTiming));
    void* block = nullptr;
    ok(cuMemHostAlloc(&block, 2 * kBytes, 0));
    source = static_cast<unsigned char*>(block);
  }
  ~Lanes() {
    ok(cuMemFreeHost(source));
    ok(cuEventDestroy_v2(event));
    for (cu::Stream stream : {first, second}) ok(cuStreamDestroy_v2(stream));
  }
  cu::Stream first = nullptr;
  cu::Stream second = nullptr;
  cu::Event event = nullptr;
  unsigned char* source = nullptr;
};

void count(void* counter) { ++*static_cast<int*>(counter); }

cu::DevicePointer at(const void* host) { return reinterpret_cast<cu::DevicePointer>(host); }

// Calls may fail from here on: another thread breaks the context. True if all of them succeeded.
bool send_around(const Lanes& lanes, const Mapped& memory, int* counter) {
  const cu::Result results[] = {
      cuMemcpyAsync(memory.pointer, at(lanes.source), kBytes, lanes.first),
      cuEventRecord(lanes.event, lanes.first),
      cuStreamWaitEvent(lanes.second, lanes.event, 0),
      cuMemcpyAsync(memory.pointer + kBytes, memory.pointer, kBytes, lanes.second),
      cuLaunchHostFunc(lanes.second, count, counter),
      cuEventRecord(lanes.event, lanes.second),
      cuStreamWaitEvent(lanes.first, lanes.event, 0),
      cuMemcpyAsync(at(lanes.source + kBytes), memory.pointer + kBytes, kBytes, lanes.first),
      cuStreamSynchronize(lanes.first),
  };
  return std::all_of(std::begin(results), std::end(results),
                     [](cu::Result result) { return result == cu::kSuccess; });
}

void verify(const unsigned char* bytes, unsigned char pattern) {
  const bool intact =
      std::all_of(bytes, bytes + kBytes, [&](unsigned char byte) { return byte == pattern; });
  expect(intact, "wrong bytes came back");
}

void work(int thread, int rounds) {
  const Current current;
  const Lanes lanes;
  int counter = 0;
  for (int round = 0; round < rounds; ++round) {
    const Mapped memory;
    const auto pattern = static_cast<unsigned char>(31 * thread + round);
    std::fill_n(lanes.source, kBytes, pattern);
    expect(send_around(lanes, memory, &counter), "a call failed");
    verify(lanes.source + kBytes, pattern);
  }
  expect(counter == rounds, "a host function got lost");
}

// Rounds end with the context broken somewhere inside, then start afresh.
void break_often(int rounds) {
  const Current current;
  for (int round = 0; round < rounds; ++round) {
    const Lanes lanes;
    const Mapped memory;
    int counter = 0;
    std::fill_n(lanes.source, 2 * kBytes, 1);
    fake_break_after(1 + round % 8, 700);
    expect(!send_around(lanes, memory, &counter), "the break went unnoticed");
    fake_reset();
    ok(cuCtxSynchronize());
  }
}

void watch(const std::atomic<bool>& done) {
  const Current current;
  while (!done) {
    std::size_t free = 0;
    std::size_t total = 0;
    ok(cuMemGetInfo_v2(&free, &total));
    ok(cuCtxSynchronize());
    expect(free <= total && fake_busy() >= 0, "the counts contradict each other");
  }
}

void hammer() {
  std::atomic<bool> done{false};
  std::thread watcher([&] { watch(done); });
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([=] { work(thread, 100); });
  }
  for (std::thread& thread : threads) thread.join();
  done = true;
  watcher.join();
}

}  // namespace

int main() {
  ok(cuInit(0));
  fake_set_delay(200, 7);
  hammer();
  break_often(40);
  for (const char* kind : {"contexts", "pushed", "streams", "events", "handles", "reservations",
                           "mapped_bytes", "memory_bytes", "host_blocks"}) {
    expect(fake_live(kind) == 0, kind);
  }
  std::puts("hammer: ok");
}
