// Which memory pools PyTorch is filling: the capture of a CUDA graph or torch.cuda.use_mem_pool.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

namespace waterflow {

class OpenPools {
 public:
  using Filter = std::function<bool(cudaStream_t)>;

  void open(c10::DeviceIndex device, c10::MempoolId_t id, Filter filter) {
    std::lock_guard lock(mutex_);
    pools_.push_back({device, id, std::move(filter)});
    count_.store(pools_.size());
  }

  void close(c10::DeviceIndex device, c10::MempoolId_t id) {
    std::lock_guard lock(mutex_);
    auto same = [&](const Pool& pool) { return pool.device == device && pool.id == id; };
    auto found = std::find_if(pools_.begin(), pools_.end(), same);
    if (found != pools_.end()) pools_.erase(found);
    count_.store(pools_.size());
  }

  // Whether what the calling thread allocates on the stream belongs to a pool. Costs one load while
  // none is open.
  bool claim(c10::cuda::CUDAStream stream) {
    if (count_.load(std::memory_order_relaxed) == 0) return false;
    std::lock_guard lock(mutex_);
    return std::any_of(pools_.begin(), pools_.end(), [&](const Pool& pool) {
      return pool.device == stream.device_index() && pool.filter(stream.stream());
    });
  }

 private:
  struct Pool {
    c10::DeviceIndex device;
    c10::MempoolId_t id;
    Filter filter;
  };

  std::atomic<std::size_t> count_{0};  // of the list, for those without the lock
  std::mutex mutex_;                   // guards the list
  std::vector<Pool> pools_;
};

}  // namespace waterflow
