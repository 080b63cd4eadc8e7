// Offset -> live chunk: an open-addressing hash table with linear probing, at most half full.
// Deletion shifts the following entries back, so that no tombstones slow a long run.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "core/arena/chunk_list.h"

namespace waterflow {

class OffsetMap {
 public:
  OffsetMap() : slots_(std::size_t{1} << bits_) {}

  std::size_t size() const { return size_; }

  Index find(std::size_t offset) const {
    for (std::size_t at = home(offset); slots_[at].chunk != kNone; at = after(at)) {
      if (slots_[at].offset == offset) return slots_[at].chunk;
    }
    return kNone;
  }

  void insert(std::size_t offset, Index chunk) {
    if (++size_ * 2 > slots_.size()) grow();
    place(offset, chunk);
  }

  void erase(std::size_t offset) {
    std::size_t hole = home(offset);
    while (slots_[hole].offset != offset || slots_[hole].chunk == kNone) hole = after(hole);
    for (std::size_t at = after(hole); slots_[at].chunk != kNone; at = after(at)) {
      // An entry may move back only if the hole is not before its home.
      const std::size_t mask = slots_.size() - 1;
      if (((at - home(slots_[at].offset)) & mask) < ((at - hole) & mask)) continue;
      slots_[hole] = slots_[at];
      hole = at;
    }
    slots_[hole].chunk = kNone;
    --size_;
  }

 private:
  struct Slot {
    std::size_t offset = 0;
    Index chunk = kNone;
  };

  std::size_t home(std::size_t offset) const {
    return offset * 0x9E3779B97F4A7C15ull >> (64 - bits_);
  }
  std::size_t after(std::size_t at) const { return (at + 1) & (slots_.size() - 1); }

  void place(std::size_t offset, Index chunk) {
    std::size_t at = home(offset);
    while (slots_[at].chunk != kNone) at = after(at);
    slots_[at] = {offset, chunk};
  }

  void grow() {
    std::vector<Slot> old(std::size_t{1} << ++bits_);
    std::swap(old, slots_);
    for (const Slot& slot : old) {
      if (slot.chunk != kNone) place(slot.offset, slot.chunk);
    }
  }

  int bits_ = 10;
  std::size_t size_ = 0;
  std::vector<Slot> slots_;
};

}  // namespace waterflow
