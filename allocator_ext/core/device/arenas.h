// Arenas over each kind of memory.
#pragma once

#include <cstddef>
#include <memory>

#include "core/arena/arena.h"

namespace waterflow {

class LaneStreams;

std::shared_ptr<Arena> host_arena(std::size_t capacity, int lanes);
// Addresses only: for planning and tests.
std::shared_ptr<Arena> virtual_arena(std::size_t capacity, int lanes);
// Device memory for the lanes of `streams`: addresses now, memory at commit().
std::shared_ptr<Arena> cuda_arena(const std::shared_ptr<LaneStreams>& streams, std::size_t capacity,
                                  TensorKind tensors);

}  // namespace waterflow
