// Places all blocks of a rehearsed schedule at once, knowing every lifetime beforehand. Best fit
// decides request by request and leaves gaps; a plan need not: the largest blocks choose first,
// each takes the lowest place where no block that may live at the same time lies (greedy by size,
// as static memory planners do).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/types.h"

namespace waterflow {

// When something happens: in pair `pair`, on lane `lane`, as event number `position` of that lane.
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

struct Block {
  std::size_t bytes;
  Moment begin;
  std::optional<Moment> end;  // none: it survives the schedule

  bool gone_before(const Block& other) const { return end && end->precedes(other.begin); }
  bool may_meet(const Block& other) const {
    return !gone_before(other) && !other.gone_before(*this);
  }
};

struct Placement {
  std::vector<std::size_t> offsets;  // as the blocks
  std::size_t extent = 0;            // the end of the highest block or obstacle
};

// Places the blocks around `obstacles` (live all the time, in address order).
Placement place(const std::vector<Block>& blocks, const std::vector<Chunk>& obstacles);

}  // namespace waterflow
