#include "core/placement.h"

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

Placement place_all(const std::vector<Block>& blocks, const std::vector<Chunk>& obstacles,
                    std::size_t limit) {
  constexpr int kRounds = 24;
  constexpr double kStep = 0.15;  // of the schedule
  std::vector<double> urgency(blocks.size());
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    urgency[i] = static_cast<double>(blocks[i].bytes);
  }
  Placement best = place_in_order(blocks, obstacles, ranked(urgency));
  if (best.extent <= limit) return best;
  const auto length = static_cast<double>(last_position(blocks) + 1);
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    urgency[i] = std::min(length, static_cast<double>(blocks[i].end.position));
  }
  Placement other =
      place_by_urgency(blocks, obstacles, std::move(urgency), kStep * length, limit, kRounds);
  return other.extent < best.extent ? other : best;
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
  Placement best;
  for (int round = 0; round < rounds; ++round) {
    Placement found = place_in_order(blocks, obstacles, ranked(urgency));
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      if (found.offsets[i] + blocks[i].bytes > limit) urgency[i] += step;
    }
    if (round == 0 || found.extent < best.extent) best = std::move(found);
    if (best.extent <= limit) break;
  }
  return best;
}

Placement place(const std::vector<Block>& blocks, const std::vector<Chunk>& obstacles,
                std::size_t limit) {
  if (blocks.size() <= Bundles::kMost) return place_all(blocks, obstacles, limit);
  const Bundles bundles(blocks);
  Placement placement = place_all(bundles.blocks(), obstacles, limit);
  placement.offsets = bundles.offsets(placement.offsets);
  return placement;
}

Bundles::Bundles(const std::vector<Block>& blocks) {
  constexpr std::int64_t kMostSpans = 2048;
  const std::int64_t length = last_position(blocks) + 1;
  for (std::int64_t spans = kMostSpans; spans > 0; spans /= 2) {
    bundle_up(blocks, (length + spans - 1) / spans);
    if (bundles_.size() <= kMost) return;
  }
}

void Bundles::bundle_up(const std::vector<Block>& blocks, std::int64_t span) {
  using Span = std::tuple<std::int32_t, std::int32_t, std::int64_t>;
  auto span_of = [span](const Moment& moment) {
    return Span{moment.pair, moment.lane, moment.position / span};
  };
  std::map<std::pair<Span, Span>, std::vector<std::size_t>> by_spans;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    by_spans[{span_of(blocks[i].begin), span_of(blocks[i].end)}].push_back(i);
  }
  bundles_.clear();
  inner_.assign(blocks.size(), 0);
  bundle_.assign(blocks.size(), 0);
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

}  // namespace waterflow
