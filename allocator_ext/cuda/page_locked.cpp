#include "cuda/page_locked.h"

#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <bit>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace waterflow {
namespace {

constexpr std::size_t kLine = 64;         // two blocks never share a line of the cache
constexpr std::size_t kPage = 16 * 1024;  // what is taken from the system at once, at least

struct Block {
  void* memory;
  std::size_t bytes;
};

// Blocks of powers of two. Taken once and never given back: that would wait for the device.
class PageLockedBlocks {
 public:
  static PageLockedBlocks& of_process() {
    static auto* blocks = new PageLockedBlocks();  // never destroyed: tensors may outlive all else
    return *blocks;
  }

  Block take(std::size_t bytes) {
    std::lock_guard lock(mutex_);
    auto& free = free_[bytes];
    if (free.empty()) add_page(bytes, free);
    void* memory = free.back();
    free.pop_back();
    return {memory, bytes};
  }

  void give_back(const Block& block) {
    std::lock_guard lock(mutex_);
    free_[block.bytes].push_back(block.memory);
  }

 private:
  static void add_page(std::size_t bytes, std::vector<void*>& free) {
    void* page = nullptr;
    const std::size_t size = std::max(bytes, kPage);
    const cudaError_t taken = cudaHostAlloc(&page, size, cudaHostAllocPortable);
    TORCH_CHECK(taken == cudaSuccess, "waterflow: no page-locked memory for a step's numbers: ",
                cudaGetErrorString(taken));
    for (std::size_t at = 0; at < size; at += bytes) free.push_back(static_cast<char*>(page) + at);
  }

  std::mutex mutex_;
  std::map<std::size_t, std::vector<void*>> free_;  // by size
};

}  // namespace

c10::DataPtr page_locked_memory(std::size_t bytes) {
  auto& blocks = PageLockedBlocks::of_process();
  auto block = std::make_unique<Block>(blocks.take(std::bit_ceil(std::max(bytes, kLine))));
  auto give_back = [](void* context) {
    const std::unique_ptr<Block> owned(static_cast<Block*>(context));
    PageLockedBlocks::of_process().give_back(*owned);
  };
  void* memory = block->memory;
  return {memory, block.release(), give_back, c10::Device(c10::DeviceType::CPU)};
}

}  // namespace waterflow
