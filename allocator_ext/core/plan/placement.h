// Places all blocks of a step or a rehearsed schedule at once, knowing every lifetime beforehand.
// Best fit decides request by request and leaves gaps; a plan need not: blocks choose one after
// another, each the lowest place where no block lies that may live at the same time. What decides
// is the order of choice (see the searches below).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "core/arena/types.h"

namespace waterflow {

// When something happens: in pair `pair`, on lane `lane`, as event number `position` of all.
struct Moment {
  std::int32_t pair;
  std::int32_t lane;
  std::int64_t position;

  // Happens before, under every interleaving of the lanes.
  bool precedes(const Moment& other) const {
    return pair < other.pair ||
           (pair == other.pair && lane == other.lane && position < other.position);
  }
};

// The end of what survives.
inline constexpr Moment kNever{std::numeric_limits<std::int32_t>::max(), 0,
                               std::numeric_limits<std::int64_t>::max()};

struct Block {
  std::size_t bytes;
  Moment begin;
  Moment end = kNever;

  bool may_meet(const Block& other) const {
    return !end.precedes(other.begin) && !other.end.precedes(begin);
  }
};

struct Placement {
  std::vector<std::size_t> offsets;  // as the blocks
  std::size_t extent = 0;            // the end of the highest block or obstacle
};

// Around `obstacles`, which are live all the time and in address order; the blocks choose in
// `order`.
Placement place_in_order(const std::vector<Block>& blocks, const std::vector<Chunk>& obstacles,
                         const std::vector<std::size_t>& order);

// The most urgent choose first. As long as the extent is above `limit`, the blocks that stick out
// become more urgent by `step` and all choose again ("squeaky wheel" optimisation, Joslin and
// Clements, 1999), at most `rounds` times, and with many blocks only while that helps. Returns the
// first placement within the limit, or else the lowest of all.
Placement place_by_urgency(const std::vector<Block>& blocks, const std::vector<Chunk>& obstacles,
                           std::vector<double> urgency, double step, std::size_t limit, int rounds);

// The lowest of several ways, each tried only where those before are above `limit`: the largest
// blocks first, as static memory planners do; then by urgency, first that of the last to go, then
// of the longest lives, then of the first to come, too many blocks being bundled before.
Placement place(const std::vector<Block>& blocks, const std::vector<Chunk>& obstacles,
                std::size_t limit);

// The search's places for the blocks; of too many it is given bundles instead.
Placement place_bundled(const std::vector<Block>& blocks,
                        const std::function<Placement(const std::vector<Block>&)>& search);

}  // namespace waterflow
