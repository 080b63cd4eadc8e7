#include "core/pile.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <queue>
#include <stdexcept>
#include <string>
#include <utility>

namespace waterflow {
namespace {

// A block, or several that come and go together. Times are numbers of events.
struct Life {
  std::size_t bytes;
  std::size_t begin;
  std::size_t end;  // one after the event that frees it

  bool meets(const Life& other) const { return begin < other.end && other.begin < end; }
};

std::vector<Life> lives_of(const std::vector<StepEvent>& events) {
  std::vector<Life> lives;
  for (std::size_t at = 0; at < events.size(); ++at) {
    const StepEvent& event = events[at];
    if (event.bytes > 0) {
      lives.push_back({static_cast<std::size_t>(event.bytes), at, events.size()});
    } else if (event.id < 0 || static_cast<std::size_t>(event.id) >= lives.size()) {
      throw std::invalid_argument("event " + std::to_string(at) + " frees block " +
                                  std::to_string(event.id) + ", which is not there");
    } else {
      lives[event.id].end = at + 1;
    }
  }
  return lives;
}

// The lowest place for each, the choosers in order.
std::vector<std::size_t> place_in_order(const std::vector<Life>& lives,
                                        const std::vector<std::size_t>& order) {
  struct Placed {
    std::size_t offset, end;
    Life life;
  };
  std::vector<Placed> placed;  // in address order
  placed.reserve(lives.size());
  std::vector<std::size_t> offsets(lives.size());
  for (std::size_t index : order) {
    const Life& life = lives[index];
    std::size_t candidate = 0;
    for (const Placed& other : placed) {
      if (other.end <= candidate || !other.life.meets(life)) continue;
      if (other.offset >= candidate && other.offset - candidate >= life.bytes) break;
      candidate = other.end;
    }
    offsets[index] = candidate;
    const auto after =
        std::upper_bound(placed.begin(), placed.end(), candidate,
                         [](std::size_t offset, const Placed& p) { return offset < p.offset; });
    placed.insert(after, {candidate, candidate + life.bytes, life});
  }
  return offsets;
}

struct Heap {
  std::vector<std::size_t> offsets;
  std::size_t extent = 0;
};

Heap heap_of(const std::vector<Life>& lives, std::vector<std::size_t> offsets) {
  Heap heap{std::move(offsets), 0};
  for (std::size_t i = 0; i < lives.size(); ++i) {
    heap.extent = std::max(heap.extent, heap.offsets[i] + lives[i].bytes);
  }
  return heap;
}

Heap heap_up(const std::vector<Life>& lives, std::size_t events, std::size_t limit) {
  constexpr int kMostRounds = 40;
  constexpr double kStep = 0.15;  // of the step, by which a block that sticks out moves ahead
  std::vector<double> urgency(lives.size());
  for (std::size_t i = 0; i < lives.size(); ++i) urgency[i] = static_cast<double>(lives[i].end);
  std::vector<std::size_t> order(lives.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  Heap best;
  for (int round = 0; round < kMostRounds; ++round) {
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return urgency[a] > urgency[b]; });
    Heap heap = heap_of(lives, place_in_order(lives, order));
    if (best.offsets.empty() || heap.extent < best.extent) best = heap;
    if (heap.extent <= limit) break;
    for (std::size_t i = 0; i < lives.size(); ++i) {
      const bool sticks_out = heap.offsets[i] + lives[i].bytes > limit;
      if (sticks_out) urgency[i] += kStep * static_cast<double>(events);
    }
  }
  return best;
}

// Comparing every two of a hundred thousand blocks takes too long. So time is cut into spans:
// blocks that begin in one span and end in one other become one, and those of a single span share a
// place of their own.
class Bundles {
 public:
  Bundles(const std::vector<Life>& lives, std::size_t events, std::size_t spans) {
    const std::size_t span = (events + spans - 1) / spans;
    std::map<std::pair<std::size_t, std::size_t>, std::vector<std::size_t>> by_spans;
    for (std::size_t i = 0; i < lives.size(); ++i) {
      by_spans[{lives[i].begin / span, (lives[i].end - 1) / span}].push_back(i);
    }
    inner_.resize(lives.size());
    bundle_.resize(lives.size());
    for (const auto& [spans, members] : by_spans) add(lives, members, spans.first == spans.second);
  }

  const std::vector<Life>& lives() const { return bundles_; }
  std::vector<std::size_t> offsets(const std::vector<std::size_t>& of_bundles) const {
    std::vector<std::size_t> offsets(inner_);
    for (std::size_t i = 0; i < offsets.size(); ++i) offsets[i] += of_bundles[bundle_[i]];
    return offsets;
  }

 private:
  void add(const std::vector<Life>& lives, const std::vector<std::size_t>& members, bool passing) {
    std::vector<Life> own;
    Life whole{0, lives[members.front()].begin, 0};
    for (std::size_t member : members) {
      own.push_back(lives[member]);
      // Those that last are together for most of their lives: one above the other.
      if (!passing) inner_[member] = whole.bytes;
      if (!passing) whole.bytes += lives[member].bytes;
      whole.begin = std::min(whole.begin, lives[member].begin);
      whole.end = std::max(whole.end, lives[member].end);
      bundle_[member] = bundles_.size();
    }
    if (passing) {
      std::vector<std::size_t> order(own.size());
      std::iota(order.begin(), order.end(), std::size_t{0});
      const Heap heap = heap_of(own, place_in_order(own, order));
      for (std::size_t i = 0; i < own.size(); ++i) inner_[members[i]] = heap.offsets[i];
      whole.bytes = heap.extent;
    }
    bundles_.push_back(whole);
  }

  std::vector<Life> bundles_;
  std::vector<std::size_t> inner_;   // per block: its offset in its bundle
  std::vector<std::size_t> bundle_;  // per block
};

// Above this many blocks they are bundled, into no more bundles than this.
constexpr std::size_t kMostBlocks = 8192;
constexpr std::size_t kMostSpans = 2048;

Bundles bundle_up(const std::vector<Life>& lives, std::size_t events) {
  std::size_t spans = kMostSpans;
  Bundles bundles(lives, events, spans);
  while (bundles.lives().size() > kMostBlocks) bundles = Bundles(lives, events, spans /= 2);
  return bundles;
}

}  // namespace

Pile pile_up(const std::vector<StepEvent>& events, std::size_t limit) {
  const std::vector<Life> lives = lives_of(events);
  Pile pile;
  if (lives.size() <= kMostBlocks) {
    pile.offsets = heap_up(lives, events.size(), limit).offsets;
  } else {
    const Bundles bundles = bundle_up(lives, events.size());
    pile.offsets = bundles.offsets(heap_up(bundles.lives(), events.size(), limit).offsets);
  }
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
