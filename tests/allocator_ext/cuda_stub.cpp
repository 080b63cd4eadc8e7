// allocator_ext/cuda on a machine without a GPU: the few functions of PyTorch's CUDA library that
// it calls are written here, over a made-up allocator, streams that are only numbers, and events
// that leave a line in a log. `run_stub` checks what goes where; the arena is the fake driver's.
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/headeronly/version.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "core/device/arenas.h"
#include "core/device/cuda_device.h"
#include "cuda/cuda_lanes.h"
#include "cuda/forwarding.h"
#include "runtime/lane.h"

namespace {

using c10::cuda::CUDAStream;
using waterflow::LaneContext;
using waterflow::LaneScope;
using Log = std::vector<std::string>;

constexpr std::size_t kBytes = 4096;
constexpr c10::StreamId kDefault = 0, kLane = 16, kSide = 32;
const auto kCuda = c10::DeviceType::CUDA;

Log calls;
bool events_fail = false;
thread_local c10::StreamId current = kDefault;

int failures = 0;
#define EXPECT(condition) \
  if (!(condition)) ++failures, std::printf("%s:%d: not so: %s\n", __FILE__, __LINE__, #condition)

Log take_calls() { return std::exchange(calls, {}); }
c10::Stream stream_of(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, {kCuda, 0}, id); }
CUDAStream cuda_stream(c10::StreamId id) { return CUDAStream(stream_of(id)); }
cudaStream_t handle(c10::StreamId id) { return reinterpret_cast<cudaStream_t>(id); }
std::string at(const char* what, c10::StreamId id) { return what + (" " + std::to_string(id)); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kCuda; }
  c10::Device exchangeDevice(c10::Device) const override { return {kCuda, 0}; }
  c10::Device getDevice() const override { return {kCuda, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream_of(current); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(std::exchange(current, stream.id()));
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex,
              c10::EventFlag) const override {
    TORCH_CHECK(!events_fail, "the device has failed");
    *event = event;
    calls.push_back(at("record", stream.id()));
  }
  void block(void*, const c10::Stream& stream) const override {
    calls.push_back(at("block", stream.id()));
  }
  void synchronizeEvent(void*) const override { calls.push_back("synchronize"); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

void release_before(void* pointer) {
  calls.push_back("deleter");
  std::free(pointer);
}

// The allocator that was there before: memory of the host, and a log. What it does not override
// would call itself for ever, so nothing else may be called.
class Before final : public waterflow::ForwardingAllocator {
 public:
  Before() : ForwardingAllocator(*this) {}
  c10::DataPtr allocate(std::size_t bytes) override {
    void* memory = raw_alloc(bytes);
    return {memory, memory, &release_before, c10::Device(kCuda, 0)};
  }
  void* raw_alloc(std::size_t bytes) override {
    return raw_alloc_with_stream(bytes, handle(current));
  }
  void* raw_alloc_with_stream(std::size_t bytes, cudaStream_t stream) override {
    calls.push_back(at("allocate", reinterpret_cast<c10::StreamId>(stream)));
    return bytes == 0 ? nullptr : std::malloc(bytes);
  }
  void raw_delete(void* pointer) override {
    calls.push_back("raw_delete");
    std::free(pointer);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_before; }
  using ForwardingAllocator::recordStream;
  void recordStream(const c10::DataPtr&, CUDAStream stream) override {
    calls.push_back(at("recordStream", stream.id()));
  }
  void beginAllocateToPool(Device, Pool, std::function<bool(cudaStream_t)>) override {}
  void endAllocateToPool(Device, Pool) override {}
  void* getBaseAllocation(void* pointer, std::size_t*) override { return pointer; }
  c10::cuda::CUDACachingAllocator::ShareableHandle shareIpcHandle(void*) override {
    return {0, "h"};
  }
  cudaError_t memcpyAsync(void*, int, const void*, int, std::size_t, cudaStream_t, bool) override {
    calls.push_back("memcpyAsync");
    return cudaSuccess;
  }
  std::string name() override { return "before"; }
};

}  // namespace

namespace c10::cuda {

namespace CUDACachingAllocator {
std::atomic<CUDAAllocator*> allocator{new Before()};
}

void c10_cuda_check_implementation(int32_t, const char*, const char*, uint32_t, bool) {}
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14
CUDAErrorLogCapture::CUDAErrorLogCapture() noexcept = default;
void c10_cuda_check_implementation(int32_t, const char*, const char*, uint32_t, bool,
                                   CUDAErrorLogCapture*) {}
#endif
DeviceIndex current_device() { return 0; }
void set_device(DeviceIndex, bool) {}
cudaStream_t CUDAStream::stream() const { return handle(id()); }
CUDAStream getCurrentCUDAStream(DeviceIndex) { return cuda_stream(current); }
CUDAStream getDefaultCUDAStream(DeviceIndex) { return cuda_stream(kDefault); }
void setCurrentCUDAStream(CUDAStream stream) { current = stream.id(); }
CUDAStream getStreamFromExternal(cudaStream_t stream, DeviceIndex) {
  return cuda_stream(reinterpret_cast<c10::StreamId>(stream));
}

}  // namespace c10::cuda

extern "C" {
cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned) {
  calls.push_back("cudaHostAlloc");
  *memory = std::malloc(bytes);
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) { return "an error"; }
cudaError_t cudaMemGetInfo(std::size_t*, std::size_t*) { return cudaSuccess; }
cudaError_t cudaMemcpyPeerAsync(void*, int, const void*, int, std::size_t, cudaStream_t) {
  calls.push_back("cudaMemcpyPeerAsync");
  return cudaSuccess;
}
}

namespace {

auto* allocator() { return c10::cuda::CUDACachingAllocator::get(); }

// A lane of its own for each check, bound to its stream; nothing of it may stay taken.
struct Lane {
  explicit Lane(const char* driver) {
    auto device = std::make_shared<waterflow::CudaDevice>(waterflow::Driver::load(driver), 0);
    auto streams = std::make_shared<waterflow::LaneStreams>(device, 2);
    arena = waterflow::cuda_arena(streams, 64 * kBytes, waterflow::TensorKind::kCuda);
    arena->commit();
    waterflow::register_arena(arena);
    waterflow::bind_cuda_stream(0, reinterpret_cast<waterflow::cu::Stream>(kLane));
    take_calls();
  }
  ~Lane() {
    waterflow::bind_cuda_stream(0, nullptr);
    EXPECT(arena->statistics().live == expected_live);
    waterflow::retire_arena(arena);
  }
  LaneContext context() const { return {arena, 0, 0, nullptr}; }
  bool holds(const c10::DataPtr& data) const { return arena->owns(data.get()); }

  std::shared_ptr<waterflow::Arena> arena;
  std::size_t expected_live = 0;
};

void check_installed() {
  auto* before = allocator();
  waterflow::install_cuda_lane_allocator();
  waterflow::install_cuda_lane_allocator();
  EXPECT(allocator() != before && c10::GetAllocator(kCuda) == allocator());
  EXPECT(allocator()->name() == "before");
}

void check_off_lane(const char*) {
  EXPECT(allocator()->raw_deleter() == &release_before);
  auto data = allocator()->allocate(kBytes);
  EXPECT(data.get_deleter() == &release_before);
  allocator()->recordStream(data, cuda_stream(kSide));
  data.clear();
  allocator()->raw_delete(allocator()->raw_alloc(kBytes));
  EXPECT((take_calls() ==
          Log{"allocate 0", "recordStream 32", "deleter", "allocate 0", "raw_delete"}));
}

void check_on_lane(const char* driver) {
  Lane lane(driver);
  c10::DataPtr kept, other = allocator()->allocate(kBytes);
  EXPECT((take_calls() == Log{"allocate 16"}));
  {
    LaneScope scope(lane.context());
    kept = allocator()->allocate(kBytes);
    EXPECT(lane.holds(kept) && kept.device() == c10::Device(kCuda, 0));
    EXPECT(!lane.holds(allocator()->allocate(0)));
    EXPECT((take_calls() == Log{"allocate 16"}));
    other.clear();  // what was there before is freed on a lane as anywhere
    EXPECT((take_calls() == Log{"deleter"}));
    auto* raw = allocator()->raw_allocate(kBytes);
    EXPECT(lane.arena->owns(raw));
    allocator()->raw_deallocate(raw);
  }
  EXPECT(lane.arena->statistics().live == kBytes);
  kept.clear();
  EXPECT(take_calls().empty());
}

void check_raw_memory(const char* driver) {
  Lane lane(driver);
  void* outside = allocator()->raw_alloc(kBytes);
  void* inside = nullptr;
  {
    LaneScope scope(lane.context());
    inside = allocator()->raw_alloc_with_stream(kBytes, handle(kLane));
    void* beside = allocator()->raw_alloc_with_stream(kBytes, handle(kSide));
    EXPECT(lane.arena->owns(inside) && !lane.arena->owns(beside));
    for (void* pointer : {outside, beside}) allocator()->raw_delete(pointer);
    allocator()->raw_delete(allocator()->raw_alloc(kBytes));
  }
  allocator()->raw_delete(inside);
  EXPECT((take_calls() == Log{"allocate 16", "allocate 32", "raw_delete", "raw_delete"}));
}

void check_other_streams_and_pools(const char* driver) {
  Lane lane(driver);
  LaneScope scope(lane.context());
  current = kSide;
  EXPECT(!lane.holds(allocator()->allocate(kBytes)));
  current = kLane;
  EXPECT(lane.holds(allocator()->allocate(kBytes)));
  allocator()->beginAllocateToPool(0, {0, 1}, [](cudaStream_t s) { return s == handle(kLane); });
  EXPECT(!lane.holds(allocator()->allocate(kBytes)));
  allocator()->beginAllocateToPool(0, {0, 2}, [](cudaStream_t) { return false; });
  allocator()->endAllocateToPool(0, {0, 1});
  EXPECT(lane.holds(allocator()->allocate(kBytes)));
  allocator()->endAllocateToPool(0, {0, 2});
  waterflow::bind_cuda_stream(0, nullptr);
  current = kSide;
  EXPECT(lane.holds(allocator()->allocate(kBytes)));  // not bound: on any stream
}

void check_recorded_streams(const char* driver) {
  Lane lane(driver);
  auto recorded = [&](c10::StreamId id) {
    LaneScope scope(lane.context());
    auto data = allocator()->allocate(kBytes);
    allocator()->recordStream(data, cuda_stream(id));
    allocator()->recordStream(data, cuda_stream(id));
    return data;
  };
  auto outside = recorded(kSide);
  outside.clear();
  EXPECT((take_calls() == Log{"record 32", "synchronize"}));
  LaneScope scope(lane.context());
  recorded(kLane).clear();
  EXPECT(take_calls().empty());
  auto inside = recorded(kSide);
  current = kSide;  // whatever is current: the lane writes there next
  inside.clear();
  current = kLane;
  EXPECT((take_calls() == Log{"record 32", "block 16"}));
  allocator()->allocate(kBytes).clear();  // the same block, and nothing is recorded any more
  EXPECT(take_calls().empty());
}

void check_failed_device(const char* driver) {
  Lane lane(driver);
  LaneScope scope(lane.context());
  auto data = allocator()->allocate(kBytes);
  allocator()->recordStream(data, cuda_stream(kSide));
  events_fail = true;
  data.clear();
  events_fail = false;
  lane.expected_live = kBytes;
}

template <typename Error>
bool throws(const char* text, const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return std::string(error.what()).find(text) != std::string::npos;
  }
  return false;
}

void check_refusals(const char* driver) {
  Lane lane(driver);
  LaneScope scope(lane.context());
  EXPECT(
      throws<c10::OutOfMemoryError>("out of memory", [] { allocator()->allocate(65 * kBytes); }));
  auto data = allocator()->allocate(kBytes);
  EXPECT(
      throws<c10::Error>("shared", [&] { allocator()->getBaseAllocation(data.get(), nullptr); }));
  EXPECT(throws<c10::Error>("shared", [&] { allocator()->shareIpcHandle(data.get()); }));
  int other = 0;
  EXPECT(allocator()->shareIpcHandle(&other).handle == "h");
}

void check_copies_between_devices(const char* driver) {
  Lane lane(driver);
  LaneScope scope(lane.context());
  auto data = allocator()->allocate(kBytes);
  int other = 0;
  auto copy = [&](void* target, int target_device, const void* source) {
    allocator()->memcpyAsync(target, target_device, source, 0, 4, handle(kLane), true);
  };
  copy(&other, 1, data.get());
  copy(&other, 0, data.get());
  copy(&other, 1, &other);
  EXPECT((take_calls() == Log{"cudaMemcpyPeerAsync", "memcpyAsync", "memcpyAsync"}));
}

void check_ordinary_memory(const char* driver) {
  Lane lane(driver);
  LaneScope scope(lane.context());
  const auto& ordinary = waterflow::ordinary_memory(kCuda);
  auto data = ordinary.allocate(kBytes, {kCuda, 0});
  EXPECT(data.get_deleter() == ordinary.deleter && current == kLane);
  EXPECT((take_calls() == Log{"allocate 0"}));
}

void check_page_locked_memory(const char*) {
  const auto& ordinary = waterflow::ordinary_memory(kCuda);
  auto one = ordinary.page_locked(8);
  auto other = ordinary.page_locked(40);
  EXPECT(one.get() != other.get() && one.device().is_cpu());
  EXPECT((take_calls() == Log{"cudaHostAlloc"}));
  void* const before = one.get();
  one.clear();
  EXPECT(ordinary.page_locked(16).get() == before);
  EXPECT(ordinary.page_locked(100).get() != nullptr);
  EXPECT((take_calls() == Log{"cudaHostAlloc"}));
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int run_stub(const char* driver) {
  check_installed();
  for (auto* check :
       {check_off_lane, check_on_lane, check_raw_memory, check_other_streams_and_pools,
        check_recorded_streams, check_failed_device, check_refusals, check_copies_between_devices,
        check_ordinary_memory, check_page_locked_memory}) {
    check(driver);
    take_calls();
  }
  return failures;
}
