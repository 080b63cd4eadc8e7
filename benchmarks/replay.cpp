// Replays an allocation log against several allocators.
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "core/arena/arena.h"
#include "core/device/arenas.h"

namespace {

using waterflow::Arena;

struct Log {
  std::vector<std::int64_t> bytes;
  std::vector<std::int32_t> ids;
  std::size_t blocks;
  std::size_t pairs;
};

Log make_log(std::vector<std::int64_t> bytes, std::vector<std::int32_t> ids) {
  const auto frees = std::count_if(bytes.begin(), bytes.end(), [](auto b) { return b < 0; });
  const auto last = *std::max_element(ids.begin(), ids.end());
  return {std::move(bytes), std::move(ids), static_cast<std::size_t>(last) + 1,
          static_cast<std::size_t>(frees)};
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
  auto arena = waterflow::virtual_arena(total_bytes(log), 1);
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

// Nanoseconds per allocate+free pair. `bytes` and `ids` are a step's `events` (bytes < 0 frees);
// `name` is "arena" (best fit), "planned" (allocate_at), "malloc" or "torch"; -1 for any other.
extern "C" __attribute__((visibility("default"))) double waterflow_replay(const std::int64_t* bytes,
                                                                          const std::int32_t* ids,
                                                                          std::size_t events,
                                                                          const char* name,
                                                                          int repeats) {
  const Log log = make_log({bytes, bytes + events}, {ids, ids + events});
  const std::string allocator = name;
  if (allocator == "arena") return replay_arena(log, repeats, false);
  if (allocator == "planned") return replay_arena(log, repeats, true);
  if (allocator == "malloc") {
    return timed(
        log, repeats, [](std::size_t size, std::size_t) { return std::malloc(size); },
        [](void* block) { std::free(block); });
  }
  if (allocator != "torch") return -1;
  auto* standard = c10::GetDefaultCPUAllocator();
  return timed(
      log, repeats, [&](std::size_t size, std::size_t) { return standard->raw_allocate(size); },
      [&](void* block) { standard->raw_deallocate(block); });
}
