#include "core/plan/rehearsal.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "core/plan/placement.h"

namespace waterflow {
namespace {

[[noreturn]] void reject(int step, const std::string& what) {
  throw std::invalid_argument("step " + std::to_string(step) + ": " + what);
}

class Rehearsal {
 public:
  Rehearsal(Allocator state, const std::vector<StepEvents>& steps, const std::vector<JobId>& jobs)
      : state_(std::move(state)), steps_(steps), jobs_(jobs), progress_(steps.size()) {
    if (jobs.size() != steps.size()) {
      throw std::invalid_argument(
          "rehearse needs one job for each step: " + std::to_string(steps.size()) + " steps, " +
          std::to_string(jobs.size()) + " jobs");
    }
    result_.offsets.resize(steps.size());
    for (const Chunk& chunk : state_.chunks()) {
      if (chunk.state == ChunkState::kLive) obstacles_.push_back(chunk);
    }
    state_.reset_peaks();
    live_ = held_ = state_.live();
  }

  RehearsalResult run(const std::vector<std::vector<Slot>>& pairs) {
    for (std::size_t pair = 0; pair < pairs.size(); ++pair) {
      play_pair(pairs[pair], static_cast<int>(pair));
    }
    result_.extent = state_.extent();
    if (!result_.fits || result_.extent > result_.peak) plan_all_at_once();
    return std::move(result_);
  }

 private:
  struct Held {
    std::size_t bytes;
    std::size_t block;   // index into blocks_
    std::size_t offset;  // where best fit has put it
  };
  struct Progress {
    std::size_t group = 0;  // next to play
    std::size_t event = 0;
    int pair = -1;  // where its last group was, and on which lane
    int lane = kNoLane;
    std::unordered_map<std::int32_t, Held> live;  // by id
  };
  // How a lane's live bytes move within a pair, counted from the pair's start.
  struct Tide {
    std::ptrdiff_t now = 0;
    std::ptrdiff_t high = 0;
  };

  void play_pair(const std::vector<Slot>& slots, int pair) {
    state_.synchronize();
    std::vector<Tide> tides(state_.lanes());
    const std::size_t before = live_;
    for (const Slot& slot : slots) {
      check_slot(slot, pair);
      play_group(slot, tides[slot.lane]);
    }
    // The lanes are independent of each other, so some interleaving has all at their high at once.
    std::size_t peak = before;
    for (const Tide& tide : tides) {
      peak += tide.high;
      live_ += tide.now;
    }
    result_.pair_peaks.push_back(peak);
    result_.peak = std::max(result_.peak, peak);
  }

  void check_slot(const Slot& slot, int pair) {
    if (slot.step < 0 || static_cast<std::size_t>(slot.step) >= steps_.size()) {
      reject(slot.step, "there are only " + std::to_string(steps_.size()) + " steps");
    }
    if (slot.lane < 0 || slot.lane >= state_.lanes()) {
      reject(slot.step, "lane " + std::to_string(slot.lane) + " is none of the " +
                            std::to_string(state_.lanes()) + " lanes");
    }
    Progress& progress = progress_[slot.step];
    if (static_cast<std::size_t>(slot.group) != progress.group ||
        progress.group >= steps_[slot.step].group_ends.size()) {
      reject(slot.step, "group " + std::to_string(slot.group) + " of " +
                            std::to_string(steps_[slot.step].group_ends.size()) +
                            " is scheduled where group " + std::to_string(progress.group) +
                            " is next");
    }
    if (progress.pair == pair && progress.lane != slot.lane) {
      reject(slot.step, "pair " + std::to_string(pair) + " has it on two lanes");
    }
    progress.pair = pair;
    progress.lane = slot.lane;
  }

  void play_group(const Slot& slot, Tide& tide) {
    const StepEvents& step = steps_[slot.step];
    Progress& progress = progress_[slot.step];
    const std::size_t end = step.group_ends[progress.group++];
    if (end < progress.event || end > step.events.size()) {
      reject(slot.step, "group ends must rise and stay within the events");
    }
    for (; progress.event < end; ++progress.event) {
      const StepEvent& event = step.events[progress.event];
      if (event.bytes == 0) reject(slot.step, "an event of 0 bytes");
      if (event.bytes < 0) {
        play_free(slot, event, progress, tide);
      } else {
        play_allocation(slot, event, progress, tide);
      }
    }
  }

  void play_free(const Slot& slot, const StepEvent& event, Progress& progress, Tide& tide) {
    const auto found = progress.live.find(event.id);
    if (found == progress.live.end()) {
      reject(slot.step, "frees id " + std::to_string(event.id) + ", which it does not hold");
    }
    const Held held = found->second;
    tide.now -= static_cast<std::ptrdiff_t>(held.bytes);
    blocks_[held.block].end = Moment{progress.pair, slot.lane, ++position_};
    if (result_.fits) state_.free(held.offset, slot.lane);
    progress.live.erase(found);
  }

  void play_allocation(const Slot& slot, const StepEvent& event, Progress& progress, Tide& tide) {
    const std::size_t bytes = state_.rounded(static_cast<std::size_t>(event.bytes));
    const std::size_t offset = best_fit(slot, bytes);
    if (!progress.live.emplace(event.id, Held{bytes, blocks_.size(), offset}).second) {
      reject(slot.step, "allocates id " + std::to_string(event.id) + " twice");
    }
    blocks_.push_back({bytes, {progress.pair, slot.lane, ++position_}});
    block_steps_.push_back(slot.step);
    if (result_.fits) result_.offsets[slot.step].push_back(offset);
    tide.now += static_cast<std::ptrdiff_t>(bytes);
    tide.high = std::max(tide.high, tide.now);
  }

  // What the allocator would do, until a request finds no place; then the walk goes on only to
  // learn the lifetimes.
  std::size_t best_fit(const Slot& slot, std::size_t bytes) {
    if (!result_.fits) return 0;
    const auto offset = state_.allocate(bytes, slot.lane, jobs_[slot.step], /*may_sync=*/false);
    if (!offset) explain(slot, bytes);
    return offset.value_or(0);
  }

  // Lifetimes are known, so the plan may do better than deciding request by request.
  void plan_all_at_once() {
    if (!within_limits_ || result_.peak > state_.capacity()) return;
    // Neither the budget nor what is held all the time is in it, so that a step takes as much above
    // that as it does alone.
    const auto goal =
        held_ + static_cast<std::size_t>(kGoal * static_cast<double>(result_.peak - held_));
    const Placement placement = place(blocks_, obstacles_, goal);
    if (placement.extent > state_.capacity()) return;
    if (result_.fits && placement.extent >= result_.extent) return;
    for (auto& offsets : result_.offsets) offsets.clear();
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      result_.offsets[block_steps_[i]].push_back(placement.offsets[i]);
    }
    result_.fits = true;
    result_.why.clear();
    result_.failed_pair = result_.failed_step = result_.failed_group = -1;
    result_.extent = placement.extent;
  }

  void explain(const Slot& slot, std::size_t bytes) {
    const JobId job = jobs_[slot.step];
    result_.fits = false;
    within_limits_ = state_.limit(job) == kNoLimit;
    result_.failed_pair = progress_[slot.step].pair;
    result_.failed_step = slot.step;
    result_.failed_group = slot.group;
    result_.why = "step " + std::to_string(slot.step) + " (job " + std::to_string(job) +
                  "), group " + std::to_string(slot.group) + ": " + std::to_string(bytes) +
                  " bytes do not fit on lane " + std::to_string(slot.lane) + "; job " +
                  std::to_string(job) + " holds " + std::to_string(state_.held(job)) +
                  ", all jobs " + std::to_string(state_.live()) + " of " +
                  std::to_string(state_.capacity()) + ", and the largest free range is " +
                  std::to_string(state_.largest_free());
    if (state_.limit(job) != kNoLimit) {
      result_.why += "; the job's limit is " + std::to_string(state_.limit(job));
    }
  }

  static constexpr double kGoal = 1.005;  // of the live peak: not worth a longer search below

  Allocator state_;
  std::vector<Chunk> obstacles_;
  std::vector<Block> blocks_;
  std::vector<int> block_steps_;
  std::int64_t position_ = 0;
  std::size_t live_ = 0;
  std::size_t held_ = 0;  // live all the time: the obstacles' bytes
  bool within_limits_ = true;
  const std::vector<StepEvents>& steps_;
  const std::vector<JobId>& jobs_;
  std::vector<Progress> progress_;
  RehearsalResult result_;
};

}  // namespace

RehearsalResult rehearse(Allocator state, const std::vector<StepEvents>& steps,
                         const std::vector<JobId>& jobs,
                         const std::vector<std::vector<Slot>>& pairs) {
  return Rehearsal(std::move(state), steps, jobs).run(pairs);
}

}  // namespace waterflow
