// The planned addresses of one step of a job, and the step's progress through them.
//
// Within a round nobody but the job touches its planned places, and within a pair the job runs on
// one lane. So a step keeps the blocks itself: no search and no lock. That is safe only as long as
// every block lives exactly as long as the profile said. A kernel may ask for something else than
// it did when it was profiled (its workspace depends on its data), so each request is compared with
// the plan, and the blocks alive after each instruction with those that should be. At the first
// difference anywhere in the round all steps of it hand their blocks to the allocator, which then
// judges every place; what has no place there is served beside every planned address.
//
// It is also safe only as long as nothing else lies where the plan has its places. So a plan
// carries the version that the arena had when the places were found. One that finds another version
// at its start looks whether they are free all the same (something else may have gone), and refuses
// to run where they are not.
//
// A plan has no lock: one lane at a time is at work on a step, and what hands the step on to
// another (the barrier of a round, the streams of a device) orders them. Steps beside each other
// share only the atomics of RoundMemory.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "core/arena/arena.h"
#include "core/arena/offset_map.h"
#include "core/arena/types.h"
#include "core/plan/rehearsal.h"

namespace waterflow {

// What the steps share that run beside each other: room beside the whole plan for requests that are
// not as planned, and whether there has been one.
struct RoundMemory {
  RoundMemory(std::size_t start, std::size_t stop) : overflow(start), overflow_stop(stop) {}

  std::atomic<std::size_t> overflow;  // next free offset
  const std::size_t overflow_stop;
  std::atomic<bool> deviated{false};  // some step's blocks are not as planned
};

// Something that the plan does not know of lies in a place of it.
class StalePlan : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

class alignas(64) MemoryPlan {  // lanes write to theirs all the time: no cache line has two
 public:
  // `events` as profiled, with the instruction of each, and the place of each allocation in order,
  // found while the arena was at `version`.
  MemoryPlan(const std::vector<StepEvent>& events, const std::vector<std::int32_t>& instructions,
             std::size_t num_instructions, std::vector<std::size_t> offsets, std::uint64_t version);

  // Puts the plan at its start. `keep_blocks`: the step keeps its blocks itself; not where the
  // arena must know each block (to log events, or because blocks survive the step). Throws
  // StalePlan where it would keep a block in a place that is not free; without `keep_blocks`, the
  // allocator judges. `part`: of the arena's `LiveBytes`, best one that no other plan has
  // meanwhile.
  void begin(Arena& arena, JobId job, std::shared_ptr<RoundMemory> round, bool keep_blocks,
             int part);
  void begin_instruction(std::size_t index);
  void end_instruction(Arena& arena, Lane lane);
  // The place for a request; nullptr: it is not as planned and there is no room beside the plan.
  void* take(Arena& arena, std::size_t bytes, Lane lane);
  // Whether the block was one that the step keeps itself; then it is gone.
  bool release(Arena& arena, const void* pointer);
  // The step has failed: what it still holds is not as planned.
  void abandon(Arena& arena, Lane lane);
  // Hands blocks that are still alive to the allocator, and the records to the arena.
  void close(Arena& arena);

  std::size_t deviations() const { return deviations_; }
  // Whether the allocator judges the places: they are free for a lane only after a sync.
  bool uses_allocator() const {
    return !keeps_blocks_ || round_->deviated.load(std::memory_order_relaxed);
  }

 private:
  void find_predecessors();
  void check_places(const Arena& arena);
  std::optional<Chunk> in_the_way(const Allocator& arena) const;
  void* take_planned(Arena& arena, std::size_t rounded, Lane lane);
  void* take_beside(Arena& arena, std::size_t rounded, Lane lane);
  bool is_free(std::size_t request) const;
  void hand_over(Arena& arena, Lane lane);
  void deviate(Arena& arena, Lane lane);
  void expect(Arena& arena, std::size_t most);
  void count(Arena& arena, std::ptrdiff_t change);

  // The plan. A set of requests is known by its checksum: the sum of a random number of each.
  std::vector<std::size_t> bytes_;
  std::vector<std::size_t> offsets_;
  std::vector<std::size_t> starts_;             // per instruction: its first request; and the end
  std::vector<std::uint64_t> alive_after_;      // per instruction: checksum of the blocks alive
  std::vector<std::size_t> first_predecessor_;  // per request, into `predecessors_`; and the end
  std::vector<std::uint32_t> predecessors_;     // requests that had part of its place last
  std::size_t extent_ = 0;                      // the highest end of all
  std::size_t most_ = 0;   // bytes alive at once, in whatever order an instruction asks for its own
  std::uint64_t version_;  // of the arena, when the places were last known to be free

  // The step under way.
  std::shared_ptr<RoundMemory> round_;
  JobId job_ = 0;
  bool keeps_blocks_ = false;
  int part_ = 0;              // of the arena's `LiveBytes`
  std::size_t expected_ = 0;  // there, of this step
  std::size_t instruction_ = 0;
  std::size_t cursor_ = 0;
  std::size_t limit_ = 0;
  std::uint64_t alive_ = 0;
  OffsetMap live_;  // offset -> request
  std::vector<std::uint8_t> is_live_;
  std::size_t fixed_ = 0;  // what the job holds beside its planned blocks
  std::size_t held_ = 0;   // its planned blocks

  // Over all steps.
  std::size_t deviations_ = 0;
  std::size_t peak_ = 0;
  std::size_t events_ = 0;
  std::vector<std::pair<double, std::size_t>> samples_;
};

}  // namespace waterflow
