#include "core/placement.h"

#include <algorithm>
#include <numeric>

namespace waterflow {
namespace {

struct Placed {
  std::size_t offset;
  std::size_t end;
  const Block* block;  // nullptr: an obstacle
};

std::vector<std::size_t> largest_first(const std::vector<Block>& blocks) {
  std::vector<std::size_t> order(blocks.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return blocks[a].bytes > blocks[b].bytes; });
  return order;
}

// The lowest offset where the block meets nobody; `placed` is in address order.
std::size_t lowest_place(const Block& block, const std::vector<Placed>& placed) {
  std::size_t candidate = 0;
  for (const Placed& other : placed) {
    if (other.end <= candidate) continue;
    if (other.block != nullptr && !other.block->may_meet(block)) continue;
    if (other.offset >= candidate && other.offset - candidate >= block.bytes) break;
    candidate = other.end;
  }
  return candidate;
}

}  // namespace

Placement place(const std::vector<Block>& blocks, const std::vector<Chunk>& obstacles) {
  std::vector<Placed> placed;
  placed.reserve(blocks.size() + obstacles.size());
  for (const Chunk& chunk : obstacles) {
    placed.push_back({chunk.offset, chunk.offset + chunk.bytes, nullptr});
  }
  Placement result;
  result.offsets.resize(blocks.size());
  result.extent = placed.empty() ? 0 : placed.back().end;
  for (std::size_t index : largest_first(blocks)) {
    const Block& block = blocks[index];
    const std::size_t offset = lowest_place(block, placed);
    const Placed entry{offset, offset + block.bytes, &block};
    auto by_offset = [](const Placed& a, const Placed& b) { return a.offset < b.offset; };
    placed.insert(std::upper_bound(placed.begin(), placed.end(), entry, by_offset), entry);
    result.offsets[index] = offset;
    result.extent = std::max(result.extent, entry.end);
  }
  return result;
}

}  // namespace waterflow
