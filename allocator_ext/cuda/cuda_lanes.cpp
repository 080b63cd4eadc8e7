#include "cuda/cuda_lanes.h"

#include <c10/core/StreamGuard.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <torch/headeronly/version.h>

#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "cuda/forwarding.h"
#include "cuda/open_pools.h"
#include "cuda/page_locked.h"
#include "cuda/recorded_streams.h"
#include "runtime/lane.h"

namespace py = pybind11;

namespace waterflow {
namespace {

using c10::cuda::CUDAStream;

// The stream on which the calling thread is a lane, by bind_cuda_stream.
thread_local std::optional<CUDAStream> bound_stream;

// Where the calling thread's lane works: on the bound stream, or on whichever is current.
CUDAStream lane_stream() {
  return bound_stream ? *bound_stream : c10::cuda::getCurrentCUDAStream();
}

void release_cuda_memory(void* pointer);

// A lane's tensors come from its arena, everything else from the allocator that was there before.
class CudaLaneAllocator final : public ForwardingAllocator {
 public:
  using ForwardingAllocator::ForwardingAllocator;

  c10::DataPtr allocate(std::size_t bytes) override {
    LaneContext* lane = serving_lane(bytes);
    if (lane == nullptr) return inner_.allocate(bytes);
    void* memory = take_memory(*lane, bytes);
    return {memory, memory, &release_cuda_memory, lane_stream().device()};
  }

  void* raw_alloc(std::size_t bytes) override {
    LaneContext* lane = serving_lane(bytes);
    return lane == nullptr ? inner_.raw_alloc(bytes) : take_memory(*lane, bytes);
  }

  void* raw_alloc_with_stream(std::size_t bytes, cudaStream_t stream) override {
    LaneContext* lane = serving_lane(bytes);
    const bool is_lanes = lane != nullptr && stream == lane_stream().stream();
    return is_lanes ? take_memory(*lane, bytes) : inner_.raw_alloc_with_stream(bytes, stream);
  }

  void raw_delete(void* pointer) override {
    if (!release(pointer)) inner_.raw_delete(pointer);
  }

  // On a lane memory of both kinds may need it. Off the lanes it is what PyTorch's own memory
  // carries, new and old: CUDA graph trees compare the two when they swap a storage's deleter.
  c10::DeleterFnPtr raw_deleter() const override {
    if (lane_for(TensorKind::kCuda) != nullptr) return &release_cuda_memory;
    return inner_.raw_deleter();
  }

  using ForwardingAllocator::recordStream;
  void recordStream(const c10::DataPtr& data, CUDAStream stream) override {
    const auto deleter = data.get_deleter();
    if (deleter == &release_cuda_memory || deleter == &release_memory) {
      recorded_.add(data.get(), stream.unwrap());
    } else {
      inner_.recordStream(data, stream);
    }
  }

  void beginAllocateToPool(Device device, Pool pool, OpenPools::Filter filter) override {
    inner_.beginAllocateToPool(device, pool, filter);
    pools_.open(device, pool, std::move(filter));
  }
  void endAllocateToPool(Device device, Pool pool) override {
    pools_.close(device, pool);
    inner_.endAllocateToPool(device, pool);
  }

  void* getBaseAllocation(void* pointer, std::size_t* bytes) override {
    refuse_to_share(pointer);
    return inner_.getBaseAllocation(pointer, bytes);
  }
  c10::cuda::CUDACachingAllocator::ShareableHandle shareIpcHandle(void* pointer) override {
    refuse_to_share(pointer);
    return inner_.shareIpcHandle(pointer);
  }

  // An arena is mapped for its own device alone: between devices only the peer copy can reach it,
  // whatever peer access PyTorch has enabled.
  cudaError_t memcpyAsync(void* target, int target_device, const void* source, int source_device,
                          std::size_t bytes, cudaStream_t stream, bool peer_access) override {
    if (target_device != source_device && (is_in_arena(target) || is_in_arena(source))) {
      return cudaMemcpyPeerAsync(target, target_device, source, source_device, bytes, stream);
    }
    return inner_.memcpyAsync(target, target_device, source, source_device, bytes, stream,
                              peer_access);
  }

  // Whether the pointer was an arena's. Does not throw: tensors are freed in destructors.
  bool release(void* pointer) {
    try {
      wait_for_recorded(pointer);
    } catch (const c10::Error& error) {
      // The device has failed. Nobody can tell when the block is free, so it stays taken.
      TORCH_WARN("waterflow: a block that record_stream was told of is lost: ",
                 error.what_without_backtrace());
      return true;
    }
    return release_if_in_arena(pointer);
  }

  CUDAAllocator& inner() { return inner_; }

 private:
  // The lane whose arena serves the calling thread now. None for what a CUDA graph captures, which
  // keeps its addresses for later replays, for other pools, and for streams beside the lane's own.
  LaneContext* serving_lane(std::size_t bytes) {
    LaneContext* lane = bytes == 0 ? nullptr : lane_for(TensorKind::kCuda);
    if (lane == nullptr) return nullptr;
    const CUDAStream stream = c10::cuda::getCurrentCUDAStream();
    if (bound_stream && *bound_stream != stream) return nullptr;
    return pools_.claim(stream) ? nullptr : lane;
  }

  // The lane that frees a block may write to it at once, in the order of its own stream; others
  // only after they have joined it. Off the lanes there is no such stream, so the host waits.
  void wait_for_recorded(const void* pointer) {
    const auto streams = recorded_.take(pointer);
    if (streams.empty()) return;
    const LaneContext* lane = lane_for(TensorKind::kCuda);
    const bool is_lanes = lane != nullptr && lane->arena->owns(pointer);
    put_after(streams, is_lanes ? std::make_optional(lane_stream().unwrap()) : std::nullopt);
  }

  static void refuse_to_share(const void* pointer) {
    TORCH_CHECK(!is_in_arena(pointer),
                "waterflow: a tensor in the memory of a lane cannot be shared with another process;"
                " share a clone that was made outside of the lane");
  }

  RecordedStreams recorded_;
  OpenPools pools_;
};

// Never destroyed: tensors may be freed while the process ends.
CudaLaneAllocator* installed = nullptr;

// The deleter of memory that a lane has taken, and of all that a lane took by raw_allocate.
void release_cuda_memory(void* pointer) {
  if (pointer != nullptr && !installed->release(pointer)) {
    installed->inner().raw_deleter()(pointer);
  }
}

// As for a tensor that is made on no lane: the allocator that was there before knows none.
c10::DataPtr allocate_ordinary(std::size_t bytes, c10::Device device) {
  const c10::StreamGuard guard(c10::cuda::getDefaultCUDAStream(device.index()).unwrap());
  return installed->inner().allocate(bytes);
}

bool is_installed() {
  return installed != nullptr && c10::cuda::CUDACachingAllocator::get() == installed;
}

// The allocator's interface differs between releases, and a call through one compiled for another
// release would end up in the wrong function without a word.
void check_torch_version() {
  const std::string built_for =
      std::to_string(TORCH_VERSION_MAJOR) + "." + std::to_string(TORCH_VERSION_MINOR) + ".";
  const auto running = py::cast<std::string>(py::module_::import("torch").attr("__version__"));
  TORCH_CHECK(running.compare(0, built_for.size(), built_for) == 0,
              "waterflow was built for torch ", built_for, "x and runs with torch ", running,
              "; build it again for this torch");
}

}  // namespace

void install_cuda_lane_allocator() {
  static std::once_flag once;
  std::call_once(once, [] {
    auto* before = c10::cuda::CUDACachingAllocator::get();
    installed = new CudaLaneAllocator(*before);
    c10::cuda::CUDACachingAllocator::allocator.store(installed);
    c10::SetAllocator(c10::DeviceType::CUDA, installed, /*priority=*/100);
    set_ordinary_memory(c10::DeviceType::CUDA,
                        {&allocate_ordinary, before->raw_deleter(), &page_locked_memory});
  });
  TORCH_CHECK(is_installed(),
              "waterflow: another CUDA allocator was put in place of the lanes' one; change "
              "PyTorch's allocator before the first use of waterflow on a CUDA device");
}

void bind_cuda_stream(int device, cu::Stream stream) {
  const auto index = static_cast<c10::DeviceIndex>(device);
  c10::cuda::set_device(index);
  if (stream == nullptr) {
    bound_stream.reset();
    c10::cuda::setCurrentCUDAStream(c10::cuda::getDefaultCUDAStream(index));
    return;
  }
  // The driver's stream and the runtime's are the same object.
  auto* external = reinterpret_cast<cudaStream_t>(stream);
  bound_stream = c10::cuda::getStreamFromExternal(external, index);
  c10::cuda::setCurrentCUDAStream(*bound_stream);
}

void bind_cuda(py::module_& m) {
  m.def("install_cuda_lane_allocator", [] {
    check_torch_version();
    install_cuda_lane_allocator();
  });
  m.def("is_cuda_lane_allocator_installed", &is_installed);
  m.def(
      "unbind_cuda_stream", [](int device) { bind_cuda_stream(device, nullptr); },
      py::arg("device"));
}

}  // namespace waterflow
