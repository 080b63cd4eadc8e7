#include "core/check/checker.h"

#include <algorithm>
#include <iterator>

namespace waterflow {
namespace {

constexpr std::size_t kMaxViolations = 1000;

std::string name_of(Lane lane) {
  return lane == kNoLane ? "a thread that is no lane" : "lane " + std::to_string(lane);
}

}  // namespace

HappensBefore::HappensBefore(int lanes)
    : lanes_(lanes), ticks_(lanes + 1), clocks_(lanes + 1, std::vector<std::uint64_t>(lanes + 1)) {
  if (lanes < 1 || lanes > kMaxLanes) {
    throw std::invalid_argument("lanes must be 1 to 64, not " + std::to_string(lanes));
  }
}

void HappensBefore::add(const Event& event) {
  const bool known_lane =
      event.lane == kNoLane || (event.lane >= 0 && static_cast<std::size_t>(event.lane) < lanes_);
  if (!known_lane) {
    throw std::invalid_argument("the log has lane " + std::to_string(event.lane) + " of " +
                                std::to_string(lanes_));
  }
  switch (event.kind) {
    case EventKind::kSync:
      join();
      break;
    case EventKind::kAlloc:
      allocate(event);
      break;
    case EventKind::kUse:
    case EventKind::kFree:
      touch(event);
      break;
  }
  ++index_;
}

HappensBefore::Access HappensBefore::tick(Lane lane) {
  const std::size_t at = slot(lane);
  ++ticks_[at];
  // A lane knows its own past; threads that are no lane share a slot but do not know each other.
  if (lane != kNoLane) clocks_[at][at] = ticks_[at];
  return {lane, ticks_[at], index_};
}

bool HappensBefore::is_ordered(const Access& earlier, Lane lane) const {
  return clocks_[slot(lane)][slot(earlier.lane)] >= earlier.clock;
}

void HappensBefore::join() {
  for (auto& clock : clocks_) clock = ticks_;
}

// The range that starts at this offset, cut off a range that spans it; or the next one above.
HappensBefore::Ranges::iterator HappensBefore::split_at(std::size_t offset) {
  auto above = ranges_.lower_bound(offset);
  if (above == ranges_.begin() || (above != ranges_.end() && above->first == offset)) return above;
  auto below = std::prev(above);
  if (below->second.end <= offset) return above;
  below->second.is_whole = false;
  Range rest = below->second;
  below->second.end = offset;
  return ranges_.emplace_hint(above, offset, std::move(rest));
}

void HappensBefore::allocate(const Event& event) {
  const std::size_t end = event.offset + event.bytes;
  const Access access = tick(event.lane);
  auto first = split_at(event.offset);
  const auto last = split_at(end);
  // An empty range, or one that split_at(end) cut, may now start at the offset.
  first = ranges_.lower_bound(event.offset);
  for (auto range = first; range != last; ++range) {
    if (range->second.live) {
      report(event, "allocated over memory that is live since event " +
                        std::to_string(range->second.accesses.front().index));
      continue;
    }
    for (const Access& earlier : range->second.accesses) {
      if (is_ordered(earlier, event.lane)) continue;
      report(event, name_of(event.lane) + " may overwrite what " + name_of(earlier.lane) +
                        " still uses since event " + std::to_string(earlier.index) +
                        ": no sync lies between");
      break;
    }
  }
  ranges_.erase(first, last);
  // All that came before is ordered before this allocation, so it stands for all of it.
  ranges_.emplace_hint(last, event.offset, Range{end, true, true, {access}});
}

void HappensBefore::touch(const Event& event) {
  const bool frees = event.kind == EventKind::kFree;
  const Access access = tick(event.lane);
  auto above = ranges_.upper_bound(event.offset);
  if (above == ranges_.begin() || std::prev(above)->second.end <= event.offset) {
    report(event, std::string(frees ? "free" : "use") + " of memory that was never allocated");
    return;
  }
  const auto found = std::prev(above);
  Range& range = found->second;
  if (!range.live) {
    report(event, frees ? "free of memory that is free" : "use of memory after its free");
    return;
  }
  if (found->first != event.offset || !range.is_whole) {
    report(event, std::string(frees ? "free" : "use") + " of memory that is no whole allocation");
    return;
  }
  const auto same = std::find_if(range.accesses.begin() + 1, range.accesses.end(),
                                 [&](const Access& other) { return other.lane == event.lane; });
  if (same == range.accesses.end()) {
    range.accesses.push_back(access);
  } else {
    *same = access;
  }
  range.live = !frees;
}

void HappensBefore::report(const Event& event, const std::string& what) {
  if (violations_.size() >= kMaxViolations) return;
  violations_.push_back({index_, event.lane, event.offset,
                         what + " (event " + std::to_string(index_) + ", offset " +
                             std::to_string(event.offset) + ")"});
}

std::vector<Violation> check_happens_before(const std::vector<Event>& log, int lanes) {
  HappensBefore checker(lanes);
  for (const Event& event : log) checker.add(event);
  return checker.violations();
}

}  // namespace waterflow
