#include "core/plan/placement.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

namespace waterflow {
namespace {

struct Placed {
  std::size_t offset;
  std::size_t end;
  const Block* block;  // nullptr: an obstacle
};

// The lowest offset where the block meets nobody; `placed` is in address order.
std::size_t lowest_place(const Block& block, const std::vector<Placed>& placed) {
  std::size_t candidate = 0;
  for (const Placed& other : placed) {
    if (other.end <= candidate) continue;
    if (other.block != nullptr && !other.block->may_meet(block)) continue;
    if (other.offset >= candidate && other.offset - candidate >= block.bytes) break;
    candidate = other.end;
  }
  return candidate;
}

std::vector<std::size_t> numbers_up_to(std::size_t count) {
  std::vector<std::size_t> numbers(count);
  std::iota(numbers.begin(), numbers.end(), std::size_t{0});
  return numbers;
}

// Highest first; equals keep their order.
std::vector<std::size_t> ranked(const std::vector<double>& urgency) {
  std::vector<std::size_t> order = numbers_up_to(urgency.size());
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return urgency[a] > urgency[b]; });
  return order;
}

std::int64_t last_position(const std::vector<Block>& blocks) {
  std::int64_t last = 0;
  for (const Block& block : blocks) {
    last = std::max(last, block.begin.position);
    if (block.end.pair != kNever.pair) last = std::max(last, block.end.position);
  }
  return last;
}

Placement lower(Placement a, Placement b) {
  return b.extent < a.extent ? std::move(b) : std::move(a);
}

std::vector<std::size_t> largest_first(const std::vector<Block>& blocks) {
  std::vector<double> sizes;
  for (const Block& block : blocks) sizes.push_back(static_cast<double>(block.bytes));
  return ranked(sizes);
}

// By the ends of their lives, by their lengths, by their beginnings: none is the best everywhere.
Placement search(const std::vector<Block>& blocks, const std::vector<Chunk>& obstacles,
                 std::size_t limit) {
  constexpr int kRounds = 24;
  const auto length = static_cast<double>(last_position(blocks) + 1);
  std::vector<double> ends, lives, beginnings;
  for (const Block& block : blocks) {
    ends.push_back(std::min(length, static_cast<double>(block.end.position)));
    beginnings.push_back(length - static_cast<double>(block.begin.position));
    lives.push_back(ends.back() + beginnings.back());
  }
  Placement best;
  for (const auto& urgency : {ends, lives, beginnings}) {
    // As urgent as can be at once: smaller steps find no lower places and take longer.
    Placement found = place_by_urgency(blocks, obstacles, urgency, length, limit, kRounds);
    best = best.offsets.empty() ? std::move(found) : lower(std::move(best), std::move(found));
    if (best.extent <= limit) break;
  }
  return best;
}

}  // namespace

Placement place_in_order(const std::vector<Block>& blocks, const std::vector<Chunk>& obstacles,
                         const std::vector<std::size_t>& order) {
  std::vector<Placed> placed;
  placed.reserve(blocks.size() + obstacles.size());
  for (const Chunk& chunk : obstacles) {
    placed.push_back({chunk.offset, chunk.offset + chunk.bytes, nullptr});
  }
  Placement result;
  result.offsets.resize(blocks.size());
  result.extent = placed.empty() ? 0 : placed.back().end;
  for (std::size_t index : order) {
    const Block& block = blocks[index];
    const std::size_t offset = lowest_place(block, placed);
    const Placed entry{offset, offset + block.bytes, &block};
    auto by_offset = [](const Placed& a, const Placed& b) { return a.offset < b.offset; };
    placed.insert(std::upper_bound(placed.begin(), placed.end(), entry, by_offset), entry);
    result.offsets[index] = offset;
    result.extent = std::max(result.extent, entry.end);
  }
  return result;
}

Placement place_by_urgency(const std::vector<Block>& blocks, const std::vector<Chunk>& obstacles,
                           std::vector<double> urgency, double step, std::size_t limit,
                           int rounds) {
  // Rounds without a lower one: of few blocks they cost next to nothing.
  const int patience = blocks.size() <= 2048 ? rounds : 6;
  Placement best;
  int best_round = 0;
  for (int round = 0; round < rounds && round - best_round < patience; ++round) {
    Placement found = place_in_order(blocks, obstacles, ranked(urgency));
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      if (found.offsets[i] + blocks[i].bytes > limit) urgency[i] += step;
    }
    if (round == 0 || found.extent < best.extent) {
      best = std::move(found);
      best_round = round;
    }
    if (best.extent <= limit) break;
  }
  return best;
}

namespace {

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

Bundles::Bundles(const std::vector<Block>& blocks, std::size_t most) {
  constexpr std::int64_t kMostSpans = 1 << 16;
  std::vector<std::size_t> order = largest_first(blocks);
  order.resize(std::min(order.size(), most / 2));
  std::vector<bool> large(blocks.size());
  for (std::size_t index : order) large[index] = true;
  const std::int64_t length = last_position(blocks) + 1;
  for (std::int64_t spans = kMostSpans; spans > 0; spans /= 2) {
    bundle_up(blocks, large, (length + spans - 1) / spans);
    if (bundles_.size() <= most) return;
  }
}

void Bundles::bundle_up(const std::vector<Block>& blocks, const std::vector<bool>& large,
                        std::int64_t span) {
  using Span = std::tuple<std::int32_t, std::int32_t, std::int64_t>;
  auto span_of = [span](const Moment& moment) {
    return Span{moment.pair, moment.lane, moment.position / span};
  };
  bundles_.clear();
  inner_.assign(blocks.size(), 0);
  bundle_.assign(blocks.size(), 0);
  std::map<std::pair<Span, Span>, std::vector<std::size_t>> by_spans;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (large[i]) {
      add(blocks, {i}, false);
    } else {
      by_spans[{span_of(blocks[i].begin), span_of(blocks[i].end)}].push_back(i);
    }
  }
  for (const auto& [spans, members] : by_spans) add(blocks, members, spans.first == spans.second);
}

std::vector<std::size_t> Bundles::offsets(const std::vector<std::size_t>& of_bundles) const {
  std::vector<std::size_t> offsets(inner_);
  for (std::size_t i = 0; i < offsets.size(); ++i) offsets[i] += of_bundles[bundle_[i]];
  return offsets;
}

void Bundles::add(const std::vector<Block>& blocks, const std::vector<std::size_t>& members,
                  bool passing) {
  // All begin in one lane's turn and end in one, so positions are enough to compare them.
  Block whole{0, blocks[members.front()].begin, blocks[members.front()].end};
  for (std::size_t member : members) {
    // Those that last are together for most of their lives: one above the other.
    if (!passing) inner_[member] = whole.bytes;
    if (!passing) whole.bytes += blocks[member].bytes;
    if (blocks[member].begin.position < whole.begin.position) whole.begin = blocks[member].begin;
    if (blocks[member].end.position > whole.end.position) whole.end = blocks[member].end;
    bundle_[member] = bundles_.size();
  }
  if (passing) {
    std::vector<Block> own;
    for (std::size_t member : members) own.push_back(blocks[member]);
    const Placement inner = place_in_order(own, {}, numbers_up_to(own.size()));
    for (std::size_t i = 0; i < own.size(); ++i) inner_[members[i]] = inner.offsets[i];
    whole.bytes = inner.extent;
  }
  bundles_.push_back(whole);
}

}  // namespace

Placement place(const std::vector<Block>& blocks, const std::vector<Chunk>& obstacles,
                std::size_t limit) {
  // Once even for a hundred thousand, which takes seconds.
  constexpr std::size_t kMostOnce = std::size_t{1} << 17;
  Placement best;
  if (blocks.size() <= kMostOnce) {
    best = place_in_order(blocks, obstacles, largest_first(blocks));
    if (best.extent <= limit) return best;
  }
  Placement found = place_bundled(
      blocks, [&](const std::vector<Block>& bundles) { return search(bundles, obstacles, limit); });
  return best.offsets.empty() ? found : lower(std::move(best), std::move(found));
}

Placement place_bundled(const std::vector<Block>& blocks,
                        const std::function<Placement(const std::vector<Block>&)>& search) {
  constexpr std::size_t kMost = 12288;  // with 8,192 of 68,000 blocks, gaps took 1.2 %, not 0.6 %
  if (blocks.size() <= kMost) return search(blocks);
  const Bundles bundles(blocks, kMost);
  Placement placement = search(bundles.blocks());
  placement.offsets = bundles.offsets(placement.offsets);
  return placement;
}

}  // namespace waterflow
