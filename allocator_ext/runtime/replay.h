// Replays an allocation log against several allocators, for the benchmark.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace waterflow {

// Nanoseconds per allocate+free pair. `bytes` and `ids` are a step's events (bytes < 0 frees);
// `allocator` is "arena" (best fit), "planned" (allocate_at), "malloc" or "torch".
double replay(const std::vector<std::int64_t>& bytes, const std::vector<std::int32_t>& ids,
              const std::string& allocator, int repeats);

}  // namespace waterflow
