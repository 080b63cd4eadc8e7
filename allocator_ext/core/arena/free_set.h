// Free chunks of one kind, ordered by (bytes, offset), for true best fit.
//
// Size classes (32 to each power of two) with a bitmap find a class in a few instructions. Within a
// class the chunks form a treap, as hundreds of equal layers may free hundreds of equal chunks: a
// list would then be walked from end to end. Nearly all trees hold one to three chunks.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "core/arena/chunk_list.h"

namespace waterflow {

class FreeSet {
 public:
  explicit FreeSet(int unit_shift) : unit_shift_(unit_shift) { roots_.fill(kNone); }

  void insert(ChunkList& chunks, Index chunk);
  void erase(ChunkList& chunks, Index chunk);
  void clear();
  // The smallest chunk of at least `bytes`, the lowest address among equals; kNone if none fits.
  Index best_fit(const ChunkList& chunks, std::size_t bytes) const;
  // Verifies order and classes; returns how many chunks there are. Throws Inconsistent.
  std::size_t check(const ChunkList& chunks) const;

 private:
  static constexpr int kStepBits = 5;
  static constexpr int kSteps = 1 << kStepBits;
  static constexpr int kClasses = (64 - kStepBits + 1) * kSteps;
  static constexpr int kWords = (kClasses + 63) / 64;

  int class_of(std::size_t bytes) const;
  int next_class(int after) const;

  std::array<Index, kClasses> roots_;
  std::array<std::uint64_t, kWords> used_{};
  int unit_shift_;
};

}  // namespace waterflow
