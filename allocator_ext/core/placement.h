// Places all blocks of a step or a rehearsed schedule at once, knowing every lifetime beforehand.
// Best fit decides request by request and leaves gaps; a plan need not: blocks choose one after
// another, each the lowest place where no block lies that may live at the same time. What decides
// is the order of choice (see the searches below).
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/types.h"

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

// Comparing every two of a hundred thousand blocks again and again takes too long. So time is cut
// into spans: blocks that begin in one span and end in one other become one, and those of a single
// span share a place of their own. The largest blocks stay by themselves, as their lives, stretched
// to whole spans, would cost most.
class Bundles {
 public:
  // Into no more than `most`, the large ones half of them, where that can be.
  Bundles(const std::vector<Block>& blocks, std::size_t most);

  const std::vector<Block>& blocks() const { return bundles_; }
  // Places of the blocks given, from those of the bundles.
  std::vector<std::size_t> offsets(const std::vector<std::size_t>& of_bundles) const;

 private:
  void bundle_up(const std::vector<Block>& blocks, const std::vector<bool>& large,
                 std::int64_t span);
  void add(const std::vector<Block>& blocks, const std::vector<std::size_t>& members, bool passing);

  std::vector<Block> bundles_;
  std::vector<std::size_t> inner_;   // per block: its offset in its bundle
  std::vector<std::size_t> bundle_;  // per block
};

}  // namespace waterflow
