#include "core/plan/pile.h"

#include <algorithm>
#include <queue>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/plan/placement.h"

namespace waterflow {
namespace {

std::vector<Block> blocks_of(const std::vector<StepEvent>& events) {
  std::vector<Block> blocks;
  for (std::size_t at = 0; at < events.size(); ++at) {
    const StepEvent& event = events[at];
    const Moment now{0, 0, static_cast<std::int64_t>(at)};
    if (event.bytes > 0) {
      blocks.push_back({static_cast<std::size_t>(event.bytes), now});
    } else if (event.id < 0 || static_cast<std::size_t>(event.id) >= blocks.size()) {
      throw std::invalid_argument("event " + std::to_string(at) + " frees block " +
                                  std::to_string(event.id) + ", which is not there");
    } else {
      blocks[event.id].end = now;
    }
  }
  return blocks;
}

Placement pile_blocks(const std::vector<Block>& blocks, std::size_t events, std::size_t limit) {
  constexpr int kRounds = 40;
  constexpr double kStep = 0.15;  // of the step
  const auto length = static_cast<double>(events);
  std::vector<double> urgency(blocks.size());
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    urgency[i] = std::min(length, static_cast<double>(blocks[i].end.position) + 1);
  }
  return place_by_urgency(blocks, {}, std::move(urgency), kStep * length, limit, kRounds);
}

}  // namespace

Pile pile_up(const std::vector<StepEvent>& events, std::size_t limit) {
  Pile pile;
  pile.offsets = place_bundled(blocks_of(events), [&](const std::vector<Block>& blocks) {
                   return pile_blocks(blocks, events.size(), limit);
                 }).offsets;
  pile.reach = reach_of(events, pile.offsets);
  for (std::size_t reach : pile.reach) pile.extent = std::max(pile.extent, reach);
  return pile;
}

std::vector<std::size_t> reach_of(const std::vector<StepEvent>& events,
                                  const std::vector<std::size_t>& offsets) {
  std::priority_queue<std::pair<std::size_t, std::size_t>> ends;  // (end, allocation)
  std::vector<bool> alive(offsets.size());
  std::vector<std::size_t> reach;
  std::size_t allocation = 0;
  for (const StepEvent& event : events) {
    if (event.bytes > 0) {
      if (allocation == offsets.size()) throw std::invalid_argument("more allocations than places");
      ends.emplace(offsets[allocation] + static_cast<std::size_t>(event.bytes), allocation);
      alive[allocation++] = true;
    } else {
      alive.at(event.id) = false;
    }
    while (!ends.empty() && !alive[ends.top().second]) ends.pop();
    reach.push_back(ends.empty() ? 0 : ends.top().first);
  }
  return reach;
}

}  // namespace waterflow
