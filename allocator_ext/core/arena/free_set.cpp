#include "core/arena/free_set.h"

namespace waterflow {
namespace {

// A fixed scramble of the index: random enough to balance the trees, and the same in every run.
std::uint32_t priority(Index chunk) { return (chunk + 1) * 2654435769u; }

bool before(const Record& a, const Record& b) {
  return a.bytes != b.bytes ? a.bytes < b.bytes : a.offset < b.offset;
}

std::size_t check_tree(const ChunkList& chunks, Index root) {
  if (root == kNone) return 0;
  const Record& record = chunks[root];
  for (Index child : {record.smaller, record.larger}) {
    if (child != kNone && priority(child) > priority(root)) {
      throw Inconsistent("free set: a child has a higher priority than its parent");
    }
  }
  if ((record.smaller != kNone && !before(chunks[record.smaller], record)) ||
      (record.larger != kNone && !before(record, chunks[record.larger]))) {
    throw Inconsistent("free set: a tree is out of order");
  }
  return 1 + check_tree(chunks, record.smaller) + check_tree(chunks, record.larger);
}

}  // namespace

int FreeSet::class_of(std::size_t bytes) const {
  const std::size_t units = bytes >> unit_shift_;
  if (units < kSteps) return static_cast<int>(units);
  const int log = 63 - __builtin_clzll(units);
  const int step = static_cast<int>(units >> (log - kStepBits)) & (kSteps - 1);
  return (log - kStepBits + 1) * kSteps + step;
}

int FreeSet::next_class(int after) const {
  int word = (after + 1) / 64;
  if (word >= kWords) return -1;
  std::uint64_t bits = used_[word] & (~std::uint64_t{0} << ((after + 1) % 64));
  while (bits == 0) {
    if (++word == kWords) return -1;
    bits = used_[word];
  }
  return word * 64 + __builtin_ctzll(bits);
}

void FreeSet::insert(ChunkList& chunks, Index chunk) {
  Record& record = chunks[chunk];
  const int size_class = class_of(record.bytes);
  used_[size_class / 64] |= std::uint64_t{1} << (size_class % 64);
  Index* link = &roots_[size_class];
  while (*link != kNone && priority(*link) > priority(chunk)) {
    Record& at = chunks[*link];
    link = before(record, at) ? &at.smaller : &at.larger;
  }
  // The chunk takes this place; the subtree that was here is split by key into its two children.
  Index rest = *link;
  *link = chunk;
  Index* low = &record.smaller;
  Index* high = &record.larger;
  while (rest != kNone) {
    Record& at = chunks[rest];
    if (before(at, record)) {
      *low = rest;
      low = &at.larger;
      rest = *low;
    } else {
      *high = rest;
      high = &at.smaller;
      rest = *high;
    }
  }
  *low = *high = kNone;
}

void FreeSet::erase(ChunkList& chunks, Index chunk) {
  const Record& record = chunks[chunk];
  const int size_class = class_of(record.bytes);
  Index* link = &roots_[size_class];
  while (*link != chunk) {
    Record& at = chunks[*link];
    link = before(record, at) ? &at.smaller : &at.larger;
  }
  // Its two subtrees become one, the higher priority on top.
  Index low = record.smaller;
  Index high = record.larger;
  while (low != kNone && high != kNone) {
    if (priority(low) > priority(high)) {
      *link = low;
      link = &chunks[low].larger;
      low = *link;
    } else {
      *link = high;
      link = &chunks[high].smaller;
      high = *link;
    }
  }
  *link = low != kNone ? low : high;
  if (roots_[size_class] == kNone)
    used_[size_class / 64] &= ~(std::uint64_t{1} << (size_class % 64));
}

void FreeSet::clear() {
  for (int at = next_class(-1); at >= 0; at = next_class(at)) roots_[at] = kNone;
  used_.fill(0);
}

Index FreeSet::best_fit(const ChunkList& chunks, std::size_t bytes) const {
  // 1. The request's own class may hold chunks that are too small: search by size.
  const int own_class = class_of(bytes);
  Index best = kNone;
  for (Index at = roots_[own_class]; at != kNone;) {
    const bool fits = chunks[at].fits(bytes);
    if (fits) best = at;
    at = fits ? chunks[at].smaller : chunks[at].larger;
  }
  if (best != kNone) return best;
  // 2. Everything in the next class that is not empty fits: take the first of its order.
  const int above = next_class(own_class);
  if (above < 0) return kNone;
  best = roots_[above];
  while (chunks[best].smaller != kNone) best = chunks[best].smaller;
  return best;
}

std::size_t FreeSet::check(const ChunkList& chunks) const {
  std::size_t count = 0;
  for (int at = 0; at < kClasses; ++at) {
    const bool used = (used_[at / 64] >> (at % 64) & 1) != 0;
    if (used != (roots_[at] != kNone)) throw Inconsistent("free set: the bitmap is wrong");
    if (used && class_of(chunks[roots_[at]].bytes) != at) {
      throw Inconsistent("free set: a chunk is in the wrong size class");
    }
    count += check_tree(chunks, roots_[at]);
  }
  return count;
}

}  // namespace waterflow
