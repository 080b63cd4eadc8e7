// The plan of a run's memory: replays a schedule on a copy of the allocator and notes where every
// allocation lands. The run then asks for exactly these places (Allocator::allocate_at).
//
// The key idea: one rehearsed order stands for EVERY interleaving of the lanes. A pair starts with
// a sync; within it the lanes are replayed one after another with syncs forbidden. A lane then gets
// only what was free when the pair began, or what that same lane freed since. So within a pair the
// ranges that two lanes allocate are disjoint, and whether a range is usable for its lane depends
// on that lane's own earlier events alone: however the lanes interleave at run time, each
// allocation finds its place free and no one else's. What one lane frees reaches the others at the
// next pair.
//
// Where best fit leaves gaps, or finds no place, the blocks are placed once more all at once (see
// placement.h), under the same rule of who may follow whom.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/arena/allocator.h"

namespace waterflow {

struct StepEvent {
  std::int64_t bytes;  // > 0: allocate the tensor or workspace `id`; < 0: free it
  std::int32_t id;
};

// One execution of a step. Group g is events[group_ends[g - 1] .. group_ends[g]). What the events
// never free stays: the state that a step creates.
struct StepEvents {
  std::vector<StepEvent> events;
  std::vector<std::int32_t> group_ends;
};

struct Slot {
  int lane;
  int step;  // index into the list of StepEvents
  int group;
};

struct RehearsalResult {
  bool fits = true;
  std::string why;  // it does not fit: a sentence for people
  int failed_pair = -1;
  int failed_step = -1;
  int failed_group = -1;
  std::vector<std::vector<std::size_t>> offsets;  // per step, one per allocation event in order
  std::size_t peak = 0;    // the most live bytes that any interleaving of the lanes can reach
  std::size_t extent = 0;  // the highest end of any allocation
  std::vector<std::size_t> pair_peaks;  // of the same kind as `peak`
};

// `jobs` gives the job of each step. Pairs are in order, as are a step's groups over them; a step
// has one lane within a pair. Throws std::invalid_argument on a schedule that breaks these rules.
RehearsalResult rehearse(Allocator state, const std::vector<StepEvents>& steps,
                         const std::vector<JobId>& jobs,
                         const std::vector<std::vector<Slot>>& pairs);

}  // namespace waterflow
