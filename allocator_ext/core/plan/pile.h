// Piles the blocks of one step up from the end of a range, so that two steps can share the range
// from its two ends (see gate.h). What counts is not only how high the pile gets, but how soon it
// falls: the neighbour can use only what lies beyond it.
//
// Blocks choose in the order of their ends, the last to die first and so lowest, each the lowest
// place free for its life. Where the pile then gets higher than it may, the blocks that stick out
// choose earlier the next time, and so on (see placement.h): the less room above the live peak, the
// slower the pile falls.
#pragma once

#include <cstddef>
#include <vector>

#include "core/plan/rehearsal.h"

namespace waterflow {

struct Pile {
  std::vector<std::size_t> offsets;  // per allocation, in order, from the range's end
  std::vector<std::size_t> reach;    // per event: the highest end of a block alive after it
  std::size_t extent = 0;            // the highest end of all
};

// `events` as in StepEvents, bytes already rounded. The lowest pile found where none is within
// `limit` bytes. Throws std::invalid_argument on a free without its allocation.
Pile pile_up(const std::vector<StepEvent>& events, std::size_t limit);

// The reach of a step with these places.
std::vector<std::size_t> reach_of(const std::vector<StepEvent>& events,
                                  const std::vector<std::size_t>& offsets);

}  // namespace waterflow
