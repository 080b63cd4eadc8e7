#include "core/plan/memory_plan.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>

#include "core/arena/checksum.h"
#include "core/arena/mark.h"

namespace waterflow {

MemoryPlan::MemoryPlan(const std::vector<StepEvent>& events,
                       const std::vector<std::int32_t>& instructions, std::size_t num_instructions,
                       std::vector<std::size_t> offsets, std::uint64_t version)
    : offsets_(std::move(offsets)),
      starts_(num_instructions + 1),
      alive_after_(num_instructions),
      version_(version) {
  std::uint64_t alive = 0;
  std::size_t event = 0, held = 0;
  for (std::size_t index = 0; index < num_instructions; ++index) {
    starts_[index] = bytes_.size();
    std::size_t freed = 0;
    for (; event < events.size() && instructions[event] == static_cast<int>(index); ++event) {
      if (events[event].bytes > 0) {
        alive += scrambled(bytes_.size());
        bytes_.push_back(static_cast<std::size_t>(events[event].bytes));
        held += bytes_.back();
      } else {
        alive -= scrambled(static_cast<std::size_t>(events[event].id));
        freed += static_cast<std::size_t>(-events[event].bytes);
      }
    }
    most_ = std::max(most_, held);
    held -= std::min(held, freed);
    alive_after_[index] = alive;
  }
  starts_[num_instructions] = bytes_.size();
  if (event != events.size() || bytes_.size() != offsets_.size()) {
    throw std::invalid_argument("a plan of " + std::to_string(bytes_.size()) +
                                " requests needs as many places and events in order, got " +
                                std::to_string(offsets_.size()) + " places");
  }
  for (std::size_t request = 0; request < bytes_.size(); ++request) {
    extent_ = std::max(extent_, offsets_[request] + bytes_[request]);
  }
  is_live_.resize(bytes_.size());
  find_predecessors();
}

// Sweeps over the requests with a map of who had each range last.
void MemoryPlan::find_predecessors() {
  std::map<std::size_t, std::pair<std::size_t, std::uint32_t>> last;  // start -> (end, request)
  for (std::size_t request = 0; request < bytes_.size(); ++request) {
    first_predecessor_.push_back(predecessors_.size());
    const std::size_t start = offsets_[request];
    const std::size_t end = start + bytes_[request];
    auto range = last.upper_bound(start);
    if (range != last.begin() && std::prev(range)->second.first > start) --range;
    while (range != last.end() && range->first < end) {
      const auto [range_start, owner] = *range;
      const auto [range_end, who] = owner;
      predecessors_.push_back(who);
      range = last.erase(range);
      if (range_start < start) last[range_start] = {start, who};
      if (range_end > end) range = last.insert({end, {range_end, who}}).first;
    }
    last[start] = {end, static_cast<std::uint32_t>(request)};
  }
  first_predecessor_.push_back(predecessors_.size());
}

void MemoryPlan::begin(Arena& arena, JobId job, std::shared_ptr<RoundMemory> round,
                       bool keep_blocks, int part) {
  round_ = std::move(round);
  job_ = job;
  keeps_blocks_ = keep_blocks;
  if (!uses_allocator()) check_places(arena);
  expect(arena, 0);  // of a step that was not closed
  part_ = part % LiveBytes::kParts;
  if (keeps_blocks_) expect(arena, most_);
  instruction_ = cursor_ = limit_ = 0;
  alive_ = 0;
  fixed_ = arena.held(job);
  held_ = 0;
  samples_.clear();
}

void MemoryPlan::check_places(const Arena& arena) {
  if (arena.version() == version_) return;
  const Allocator now = arena.snapshot();
  const std::optional<Chunk> other = in_the_way(now);
  // A step beside this one may have handed its blocks over meanwhile: then the allocator judges.
  if (uses_allocator()) return;
  if (other || extent_ > now.capacity()) {
    const std::string what = other ? std::to_string(other->bytes) + " bytes of job " +
                                         std::to_string(other->job) + " lie at offset " +
                                         std::to_string(other->offset) + ", in a place of the plan"
                                   : "it ends at " + std::to_string(now.capacity()) +
                                         " bytes, the plan at " + std::to_string(extent_);
    throw StalePlan("the plan of a step of job " + std::to_string(job_) +
                    " was made for the arena at version " + std::to_string(version_) +
                    ", which is now at version " + std::to_string(now.version()) + ": " + what +
                    ". Ask for the arena's version before each use of a plan, and plan again "
                    "where it is another");
  }
  version_ = now.version();
}

// A live chunk of the arena in a place of the plan. Linear in the requests; only a plan that was
// made for another version asks.
std::optional<Chunk> MemoryPlan::in_the_way(const Allocator& arena) const {
  std::map<std::size_t, std::size_t> places;  // start -> end, joined where they meet
  for (std::size_t request = 0; request < offsets_.size(); ++request) {
    std::size_t start = offsets_[request];
    std::size_t end = start + bytes_[request];
    auto place = places.upper_bound(end);
    while (place != places.begin() && std::prev(place)->second >= start) {
      --place;
      start = std::min(start, place->first);
      end = std::max(end, place->second);
      place = places.erase(place);
    }
    places.emplace_hint(place, start, end);
  }
  for (const Chunk& chunk : arena.chunks()) {
    if (chunk.state != ChunkState::kLive) continue;
    const auto above = places.lower_bound(chunk.offset + chunk.bytes);
    if (above != places.begin() && std::prev(above)->second > chunk.offset) return chunk;
  }
  return std::nullopt;
}

void MemoryPlan::begin_instruction(std::size_t index) {
  instruction_ = index;
  cursor_ = starts_[index];
  limit_ = starts_[index + 1];
}

void MemoryPlan::end_instruction(Arena& arena, Lane lane) {
  if (keeps_blocks_ && alive_ != alive_after_[instruction_]) deviate(arena, lane);
}

void* MemoryPlan::take(Arena& arena, std::size_t bytes, Lane lane) {
  const std::size_t mask = arena.alignment() - 1;
  const std::size_t rounded = (bytes + mask) & ~mask;
  if (keeps_blocks_ && round_->deviated.load(std::memory_order_relaxed)) hand_over(arena, lane);
  const bool as_planned = cursor_ < limit_ && bytes_[cursor_] == rounded;
  if (as_planned) {
    if (void* memory = take_planned(arena, rounded, lane)) return memory;
  }
  deviate(arena, lane);
  return take_beside(arena, rounded, lane);
}

void* MemoryPlan::take_planned(Arena& arena, std::size_t rounded, Lane lane) {
  const std::size_t request = cursor_++;
  const std::size_t offset = offsets_[request];
  if (!keeps_blocks_) return arena.allocate_at(offset, rounded, lane, job_);
  if (!is_free(request)) return nullptr;
  live_.insert(offset, static_cast<Index>(request));
  is_live_[request] = 1;
  alive_ += scrambled(request);
  count(arena, static_cast<std::ptrdiff_t>(rounded));
  return arena.pointer_to(offset);
}

void* MemoryPlan::take_beside(Arena& arena, std::size_t rounded, Lane lane) {
  ++deviations_;
  std::size_t offset = round_->overflow.load();
  do {  // a request that is refused must not take the room of others
    const std::size_t stop = round_->overflow_stop;
    if (rounded > stop || offset > stop - rounded) return nullptr;
  } while (!round_->overflow.compare_exchange_weak(offset, offset + rounded));
  return arena.allocate_at(offset, rounded, lane, job_);
}

// By induction over the requests so far it is enough to ask those who had the place last.
bool MemoryPlan::is_free(std::size_t request) const {
  const auto begin = predecessors_.begin();
  return std::none_of(begin + first_predecessor_[request], begin + first_predecessor_[request + 1],
                      [this](std::uint32_t who) { return is_live_[who] != 0; });
}

bool MemoryPlan::release(Arena& arena, const void* pointer) {
  if (!keeps_blocks_) return false;
  const std::size_t offset = arena.offset_of(pointer);
  const Index request = live_.find(offset);
  if (request == kNone) return false;
  live_.erase(offset);
  is_live_[request] = 0;
  alive_ -= scrambled(request);
  count(arena, -static_cast<std::ptrdiff_t>(bytes_[request]));
  return true;
}

void MemoryPlan::abandon(Arena& arena, Lane lane) {
  if (round_) deviate(arena, lane);
}

void MemoryPlan::deviate(Arena& arena, Lane lane) {
  round_->deviated.store(true, std::memory_order_relaxed);
  hand_over(arena, lane);
}

// From now on the blocks are the allocator's, like any others.
void MemoryPlan::hand_over(Arena& arena, Lane lane) {
  if (!keeps_blocks_) return;
  keeps_blocks_ = false;
  for (std::size_t request = 0; request < offsets_.size() && live_.size() > 0; ++request) {
    if (!is_live_[request]) continue;
    live_.erase(offsets_[request]);
    is_live_[request] = 0;
    held_ -= bytes_[request];
    arena.live_bytes().add(part_, -static_cast<std::ptrdiff_t>(bytes_[request]));
    if (arena.allocate_at(offsets_[request], bytes_[request], lane, job_) == nullptr) {
      throw Inconsistent("a block of a planned step lies where the allocator has another");
    }
  }
  expect(arena, 0);
}

// The step is going to hold so many bytes at most.
void MemoryPlan::expect(Arena& arena, std::size_t most) {
  if (most == expected_) return;
  const auto change = static_cast<std::ptrdiff_t>(most - expected_);
  arena.live_bytes().expect(part_, change);
  expected_ = most;
}

void MemoryPlan::count(Arena& arena, std::ptrdiff_t change) {
  // A step's shape shows with a sample every few events; the timeline thins them further.
  constexpr std::size_t kSampleEvery = 8;
  held_ += static_cast<std::size_t>(change);
  arena.live_bytes().add(part_, change);
  peak_ = std::max(peak_, fixed_ + held_);
  if (events_++ % kSampleEvery == 0 || held_ == 0) {
    samples_.emplace_back(steady_seconds(), fixed_ + held_);
  }
}

void MemoryPlan::close(Arena& arena) {
  hand_over(arena, 0);  // a failed step, or code that keeps a tensor of a step
  if (peak_ > 0) arena.close_plan(job_, peak_, extent_, samples_);
  samples_.clear();
}

}  // namespace waterflow
