#include "runtime/replay.h"

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <stdexcept>

#include "core/arena/arena.h"

namespace waterflow {
namespace {

struct Log {
  const std::vector<std::int64_t>& bytes;
  const std::vector<std::int32_t>& ids;
  std::size_t blocks;
  std::size_t pairs;
};

Log make_log(const std::vector<std::int64_t>& bytes, const std::vector<std::int32_t>& ids) {
  if (bytes.size() != ids.size() || bytes.empty()) {
    throw std::invalid_argument("a log needs events, and one id for each");
  }
  const auto frees = std::count_if(bytes.begin(), bytes.end(), [](auto b) { return b < 0; });
  const auto last = *std::max_element(ids.begin(), ids.end());
  return {bytes, ids, static_cast<std::size_t>(last) + 1, static_cast<std::size_t>(frees)};
}

// Allocations that the log never frees are freed after each repeat, outside the clock.
template <typename Allocate, typename Free>
double timed(const Log& log, int repeats, Allocate allocate, Free release) {
  std::vector<void*> live(log.blocks, nullptr);
  double seconds = 0;
  for (int repeat = 0; repeat < repeats; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    std::size_t request = 0;
    for (std::size_t i = 0; i < log.bytes.size(); ++i) {
      void*& block = live[log.ids[i]];
      if (log.bytes[i] > 0) {
        block = allocate(static_cast<std::size_t>(log.bytes[i]), request++);
      } else {
        release(block);
        block = nullptr;
      }
    }
    seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    for (void*& block : live) {
      if (block != nullptr) release(block);
      block = nullptr;
    }
  }
  return seconds * 1e9 / (static_cast<double>(log.pairs) * repeats);
}

std::size_t total_bytes(const Log& log) {
  std::size_t total = 0;
  for (auto bytes : log.bytes) total += bytes > 0 ? bytes : 0;
  return total;
}

double replay_arena(const Log& log, int repeats, bool planned) {
  auto arena = Arena::virtual_only(total_bytes(log), 1);
  std::vector<std::size_t> offsets;
  if (planned) {  // the places that best fit finds serve as the plan
    timed(
        log, 1,
        [&](std::size_t bytes, std::size_t) {
          void* block = arena->allocate(bytes, 0, 0);
          offsets.push_back(arena->offset_of(block));
          return block;
        },
        [&](void* block) { arena->free(block, 0); });
    arena->synchronize();
  }
  return timed(
      log, repeats,
      [&](std::size_t bytes, std::size_t request) {
        if (request == 0) arena->synchronize();  // as at the start of a step
        return planned ? arena->allocate_at(offsets[request], bytes, 0, 0)
                       : arena->allocate(bytes, 0, 0);
      },
      [&](void* block) { arena->free(block, 0); });
}

}  // namespace

double replay(const std::vector<std::int64_t>& bytes, const std::vector<std::int32_t>& ids,
              const std::string& allocator, int repeats) {
  const Log log = make_log(bytes, ids);
  if (allocator == "arena") return replay_arena(log, repeats, false);
  if (allocator == "planned") return replay_arena(log, repeats, true);
  if (allocator == "malloc") {
    return timed(
        log, repeats, [](std::size_t size, std::size_t) { return std::malloc(size); },
        [](void* block) { std::free(block); });
  }
  if (allocator != "torch") throw std::invalid_argument("no allocator named " + allocator);
  auto* standard = c10::GetDefaultCPUAllocator();
  return timed(
      log, repeats, [&](std::size_t size, std::size_t) { return standard->raw_allocate(size); },
      [&](void* block) { standard->raw_deallocate(block); });
}

}  // namespace waterflow
