#include "cuda/page_locked.h"

#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDAException.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <map>
#include <mutex>
#include <vector>

namespace waterflow {
namespace {

constexpr std::size_t kLine = 64;         // two blocks never share a line of the cache
constexpr std::size_t kPage = 16 * 1024;  // what is taken from the system at once, at least

// Blocks of powers of two. Taken once and never given back: that would wait for the device.
class PageLockedBlocks {
 public:
  static PageLockedBlocks& of_process() {
    static auto* blocks = new PageLockedBlocks();  // never destroyed: tensors may outlive all else
    return *blocks;
  }

  void* take(std::size_t bytes) {
    std::lock_guard lock(mutex_);
    auto& free = free_[bytes];
    if (free.empty()) add_page(bytes, free);
    void* block = free.back();
    free.pop_back();
    return block;
  }

  void give_back(void* block, std::size_t bytes) {
    std::lock_guard lock(mutex_);
    free_[bytes].push_back(block);
  }

 private:
  static void add_page(std::size_t bytes, std::vector<void*>& free) {
    void* page = nullptr;
    const std::size_t size = std::max(bytes, kPage);
    C10_CUDA_CHECK(cudaHostAlloc(&page, size, cudaHostAllocPortable));
    for (std::size_t at = 0; at < size; at += bytes) free.push_back(static_cast<char*>(page) + at);
  }

  std::mutex mutex_;
  std::map<std::size_t, std::vector<void*>> free_;  // by size
};

}  // namespace

at::Tensor page_locked_tensor(std::int64_t elements, c10::ScalarType dtype) {
  const std::size_t wanted = static_cast<std::size_t>(elements) * c10::elementSize(dtype);
  const std::size_t bytes = std::bit_ceil(std::max(wanted, kLine));
  auto give_back = [bytes](void* block) { PageLockedBlocks::of_process().give_back(block, bytes); };
  return at::from_blob(PageLockedBlocks::of_process().take(bytes), {elements}, give_back,
                       at::TensorOptions().dtype(dtype));
}

}  // namespace waterflow
