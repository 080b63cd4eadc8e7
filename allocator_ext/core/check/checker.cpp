#include "core/check/checker.h"

#include <algorithm>
#include <iterator>

namespace waterflow {
namespace {

constexpr std::size_t kMaxViolations = 1000;

std::string name_of(Lane lane) {
  if (lane >= kFirstCopier) return "copier " + std::to_string(lane - kFirstCopier);
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
  const bool copies = event.kind == EventKind::kCopy;
  const bool known_lane =
      event.lane == kNoLane || (event.lane >= 0 && static_cast<std::size_t>(event.lane) < lanes_);
  if (copies && event.lane >= kFirstCopier) {
    learn(event.lane);
  } else if (copies || !known_lane) {
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
    case EventKind::kMark:
      mark(event);
      break;
    case EventKind::kCopy:
      copy(event);
      break;
    case EventKind::kJoin:
      join_copier(event);
      break;
  }
  ++index_;
}

std::size_t HappensBefore::slot(Lane lane) const {
  if (lane == kNoLane) return lanes_;
  return lane < kFirstCopier ? static_cast<std::size_t>(lane) : copiers_.at(lane);
}

// A copier that may be new.
void HappensBefore::learn(Lane lane) {
  if (!copiers_.emplace(lane, ticks_.size()).second) return;
  ticks_.push_back(0);
  clocks_.emplace_back();
  for (auto& clock : clocks_) clock.resize(ticks_.size());
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

// Of the lanes, and of threads that are none; of what copiers do each knows what any of them knew.
void HappensBefore::join() {
  std::vector<std::uint64_t> all(ticks_.size());
  for (std::size_t lane = 0; lane <= lanes_; ++lane) {
    raise(all, clocks_[lane]);
    all[lane] = ticks_[lane];
  }
  for (std::size_t lane = 0; lane <= lanes_; ++lane) clocks_[lane] = all;
}

void HappensBefore::raise(std::vector<std::uint64_t>& clock, const std::vector<std::uint64_t>& to) {
  for (std::size_t slot = 0; slot < to.size(); ++slot)
    clock[slot] = std::max(clock[slot], to[slot]);
}

void HappensBefore::mark(const Event& event) { marks_[event.offset] = clocks_[slot(event.lane)]; }

// The lane's clock has no slot yet for copiers that were met after the mark.
void HappensBefore::copy(const Event& event) {
  const std::size_t at = slot(event.lane);
  if (const auto moment = marks_.find(event.bytes); moment != marks_.end()) {
    raise(clocks_[at], moment->second);
    marks_.erase(moment);
  }
  const Access access = tick(event.lane);
  const auto found = ranges_.find(event.offset);
  if (found == ranges_.end() || !found->second.live || !found->second.is_whole) {
    report(event, "copy of memory that is no live allocation");
    return;
  }
  for (const Access& earlier : found->second.accesses) {
    if (is_ordered(earlier, event.lane)) continue;
    report(event, name_of(event.lane) + " may copy what " + name_of(earlier.lane) +
                      " has not done with since event " + std::to_string(earlier.index) +
                      ": the copy does not wait for it");
    break;
  }
  found->second.accesses.push_back(access);
}

void HappensBefore::join_copier(const Event& event) {
  learn(static_cast<Lane>(event.offset));
  raise(clocks_[slot(event.lane)], clocks_[slot(static_cast<Lane>(event.offset))]);
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
  for (const Access& earlier : range.accesses) {
    if (earlier.lane < kFirstCopier || is_ordered(earlier, event.lane)) continue;
    report(event, name_of(event.lane) + (frees ? " frees" : " uses") + " what " +
                      name_of(earlier.lane) + " may still copy since event " +
                      std::to_string(earlier.index) + ": it does not wait for the copy");
    break;
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
