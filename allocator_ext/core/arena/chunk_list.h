// All chunks of an arena in address order: a pool of records, linked by index, and an index by
// address. Indices instead of pointers make a copy of the whole allocator a copy of vectors.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/arena/types.h"

namespace waterflow {

using Index = std::uint32_t;
inline constexpr Index kNone = ~Index{0};

// One cache line: a split or merge touches three of them.
struct alignas(64) Record {
  std::size_t offset = 0;
  std::size_t bytes = 0;
  LaneMask users = 0;       // lanes that used it in `epoch`; stale in any later epoch
  std::uint64_t epoch = 0;  // syncs so far when `users` was last written
  Index prev = kNone;
  Index next = kNone;
  Index smaller = kNone;  // children in a free set's tree
  Index larger = kNone;
  JobId job = -1;
  std::int16_t lane = kNoLane;  // as in Chunk
  ChunkState state = ChunkState::kSynced;

  std::size_t end() const { return offset + bytes; }
  bool is_live() const { return state == ChunkState::kLive; }
  bool is_free() const { return state != ChunkState::kLive; }
  bool is_synced() const { return state == ChunkState::kSynced; }
  bool is_unsynced() const { return state == ChunkState::kUnsynced; }
  bool is_last() const { return next == kNone; }
  bool fits(std::size_t wanted) const { return bytes >= wanted; }
  bool may_be_taken_by(Lane taker) const {
    return is_synced() || (is_unsynced() && lane == taker && taker != kNoLane);
  }
  bool merges_with(const Record& other) const {
    return is_free() && state == other.state && lane == other.lane;
  }
  LaneMask users_in(std::uint64_t now) const { return epoch == now ? users : 0; }
};

class ChunkList {
 public:
  explicit ChunkList(std::size_t capacity);

  Record& operator[](Index index) { return records_[index]; }
  const Record& operator[](Index index) const { return records_[index]; }
  Index head() const { return head_; }
  Index tail() const { return tail_; }
  std::size_t size() const { return size_; }
  std::size_t capacity() const { return records_[tail_].end(); }

  // Keeps the low `bytes` in the chunk and returns a new one of the same kind for the rest.
  Index split(Index chunk, std::size_t bytes);
  // The chunk takes over its upper neighbour's range; the neighbour's record is gone.
  void absorb_next(Index chunk);
  // The chunk that holds this address, which must be below the capacity.
  Index containing(std::size_t offset) const;
  // The caller keeps the tail's kind in mind: these move the end of the last chunk, or add one.
  void stretch_tail(std::size_t capacity);
  void append(std::size_t bytes);
  void drop_tail();

 private:
  // The index by address: the arena in up to 4,096 regions, each with the first chunk that starts
  // in it, and a two-level bitmap of the regions that have one. Constant work for each split and
  // merge; a look-up walks only the chunks of one region.
  static constexpr int kRegionBits = 12;
  static constexpr Index kRegions = Index{1} << kRegionBits;

  Index new_record();
  void link_after(Index chunk, Index added);
  Index region_of(std::size_t offset) const { return static_cast<Index>(offset >> region_shift_); }
  void index_start(Index chunk);
  void unindex_start(Index chunk);
  void rebuild_index();
  Index first_start_above(Index region) const;

  std::vector<Record> records_;
  std::vector<Index> spare_;
  Index head_ = kNone;
  Index tail_ = kNone;
  std::size_t size_ = 0;
  int region_shift_ = 0;
  std::vector<Index> first_in_region_;
  std::array<std::uint64_t, kRegions / 64> used_regions_{};
  std::uint64_t used_words_ = 0;
};

}  // namespace waterflow
