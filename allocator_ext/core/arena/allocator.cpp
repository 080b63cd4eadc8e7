#include "core/arena/allocator.h"

#include <algorithm>
#include <string>
#include <utility>

namespace waterflow {
namespace {

const Options& checked(const Options& options) {
  const std::size_t alignment = options.alignment;
  if (alignment == 0 || (alignment & (alignment - 1)) != 0) {
    throw std::invalid_argument("alignment must be a power of two, not " +
                                std::to_string(alignment));
  }
  if (options.lanes < 1 || options.lanes > kMaxLanes) {
    throw std::invalid_argument("lanes must be 1 to 64, not " + std::to_string(options.lanes));
  }
  if (options.capacity < alignment) {
    throw std::invalid_argument("a capacity of " + std::to_string(options.capacity) +
                                " bytes is below the alignment of " + std::to_string(alignment));
  }
  return options;
}

}  // namespace

Allocator::Allocator(const Options& options)
    : unit_shift_(__builtin_ctzll(checked(options).alignment)),
      capacity_(options.capacity >> unit_shift_ << unit_shift_),
      chunks_(capacity_),
      unsynced_(options.lanes, FreeSet(unit_shift_)),
      synced_(unit_shift_) {
  add_free(chunks_.head());
}

std::optional<std::size_t> Allocator::allocate(std::size_t bytes, Lane lane, JobId job,
                                               bool may_sync) {
  check_request(bytes, lane, job);
  if (bytes > capacity_) return std::nullopt;  // also keeps the rounding from overflowing
  bytes = rounded(bytes);
  if (!within_limit(job, bytes)) return std::nullopt;
  // 1. What this lane freed itself: nobody else can use it before a sync.
  Index found = find_unsynced(bytes, lane);
  // 2. What any lane could have; of it the untouched tail last.
  if (found == kNone) found = find_synced(bytes);
  // 3. What the other lanes freed: they must wait for each other first.
  if (found == kNone && may_sync && sync_may_help(bytes)) {
    if (attached_.sync_hook) attached_.sync_hook();
    ++forced_syncs_;
    merge_unsynced();
    found = find_synced(bytes);
  }
  // 4. Out of memory: the caller's turn.
  if (found == kNone) return std::nullopt;
  return make_live(carve(found, chunks_[found].offset, bytes), lane, job);
}

bool Allocator::allocate_at(std::size_t offset, std::size_t bytes, Lane lane, JobId job) {
  check_request(bytes, lane, job);
  if (offset % alignment() != 0) {
    throw std::invalid_argument("offset " + std::to_string(offset) + " is not a multiple of " +
                                std::to_string(alignment()));
  }
  if (offset >= capacity_ || bytes > capacity_ - offset) return false;
  bytes = rounded(bytes);
  if (!within_limit(job, bytes)) return false;
  const Index first = chunks_.containing(offset);
  if (!is_usable(first, offset + bytes, lane)) return false;
  make_live(carve(first, offset, bytes), lane, job);
  return true;
}

void Allocator::use(std::size_t offset, Lane lane) {
  check_lane(lane);
  Record& record = chunks_[live_at(offset)];
  add_users(record, mask_of(lane));
  log(EventKind::kUse, lane, record.job, offset, record.bytes);
}

JobId Allocator::free(std::size_t offset, Lane lane) {
  check_lane(lane);
  const Index chunk = live_at(offset);
  Record& record = chunks_[chunk];
  const JobId job = record.job;
  log(EventKind::kFree, lane, job, offset, record.bytes);
  live_chunks_.erase(offset);
  live_ -= record.bytes;
  live_checksum_ -= scrambled(offset, record.bytes);
  accounts_[job].held -= record.bytes;
  add_users(record, mask_of(lane));
  record.lane = static_cast<std::int16_t>(key_of(record));
  record.state = ChunkState::kUnsynced;
  record.job = -1;
  coalesce(chunk);
  return job;
}

void Allocator::synchronize() {
  ++explicit_syncs_;
  merge_unsynced();
}

Index Allocator::find_unsynced(std::size_t bytes, Lane lane) const {
  return lane == kNoLane ? kNone : unsynced_[lane].best_fit(chunks_, bytes);
}

// The tail comes last whatever its size: placement then does not depend on the capacity as long as
// everything fits, so a plan made for one budget holds for any larger one.
Index Allocator::find_synced(std::size_t bytes) const {
  const Index found = synced_.best_fit(chunks_, bytes);
  if (found != kNone) return found;
  return wilderness_ != kNone && chunks_[wilderness_].fits(bytes) ? wilderness_ : kNone;
}

// A sync that frees nothing would stall the lanes for nothing.
bool Allocator::sync_may_help(std::size_t bytes) const {
  return unsynced_bytes_ > 0 && free_bytes() >= bytes;
}

bool Allocator::is_usable(Index first, std::size_t end, Lane lane) const {
  for (Index chunk = first; chunks_[chunk].may_be_taken_by(lane); chunk = chunks_[chunk].next) {
    if (chunks_[chunk].end() >= end) return true;
  }
  return false;
}

// Cuts [offset, offset + bytes) out of the free chunks from `first` on, as one chunk in no set.
// What remains below and above keeps its kind.
Index Allocator::carve(Index first, std::size_t offset, std::size_t bytes) {
  remove_free(first);
  if (chunks_[first].offset < offset) {
    const Index below = first;
    first = chunks_.split(below, offset - chunks_[below].offset);
    add_free(below);
  }
  if (chunks_[first].bytes > bytes) add_free(chunks_.split(first, bytes));
  while (chunks_[first].bytes < bytes) {
    const Index next = chunks_[first].next;
    const std::size_t missing = bytes - chunks_[first].bytes;
    remove_free(next);
    if (chunks_[next].bytes > missing) add_free(chunks_.split(next, missing));
    chunks_.absorb_next(first);
  }
  return first;
}

std::size_t Allocator::make_live(Index chunk, Lane lane, JobId job) {
  Record& record = chunks_[chunk];
  record.state = ChunkState::kLive;
  record.lane = static_cast<std::int16_t>(lane);
  record.job = job;
  record.users = mask_of(lane);
  record.epoch = epoch_;
  live_chunks_.insert(record.offset, chunk);
  Account& account = accounts_[job];
  account.held += record.bytes;
  account.peak = std::max(account.peak, account.held);
  live_ += record.bytes;
  live_checksum_ += scrambled(record.offset, record.bytes);
  peak_ = std::max(peak_, live_);
  extent_ = std::max(extent_, record.end());
  ++allocations_;
  log(EventKind::kAlloc, lane, job, record.offset, record.bytes);
  return record.offset;
}

Index Allocator::live_at(std::size_t offset) const {
  const Index chunk = live_chunks_.find(offset);
  if (chunk != kNone) return chunk;
  throw UnknownChunk("no live chunk starts at offset " + std::to_string(offset) +
                     ": it was freed before, or is not of this arena");
}

void Allocator::add_users(Record& record, LaneMask users) {
  record.users = record.users_in(epoch_) | users;
  record.epoch = epoch_;
}

// The lane that may take a chunk which is about to be freed, before any sync: the only one that
// used it since the last. (The Waterwave paper, section 4.2 b, takes the allocating lane. That
// races once a job's groups move between lanes; tests put its rule in the place of this one to show
// it.)
Lane Allocator::key_of(const Record& record) {
  const LaneMask users = record.users;
  const bool one_lane = (users & (users - 1)) == 0;
  return one_lane ? __builtin_ctzll(users) : kNoLane;
}

// Puts a freed chunk into its set, merged with neighbours of its own kind only.
void Allocator::coalesce(Index chunk) {
  const Index below = chunks_[chunk].prev;
  const Index above = chunks_[chunk].next;
  if (above != kNone && chunks_[above].merges_with(chunks_[chunk])) {
    remove_free(above);
    chunks_.absorb_next(chunk);
  }
  if (below != kNone && chunks_[below].merges_with(chunks_[chunk])) {
    remove_free(below);
    chunks_.absorb_next(below);
    chunk = below;
  }
  add_free(chunk);
}

// After a sync: every free chunk is synced, and each run of free neighbours is one chunk. Live
// chunks forget their users too, by the new epoch.
void Allocator::merge_unsynced() {
  log(EventKind::kSync, kNoLane, -1, 0, 0);
  ++epoch_;
  if (unsynced_bytes_ == 0) return;
  unsynced_bytes_ = 0;
  for (FreeSet& set : unsynced_) set.clear();
  for (Index chunk = chunks_.head(); chunk != kNone; chunk = chunks_[chunk].next) {
    if (chunks_[chunk].is_live()) continue;
    Index next = chunks_[chunk].next;
    const bool alone = next == kNone || chunks_[next].is_live();
    if (chunks_[chunk].is_synced()) {
      if (alone) continue;
      remove_free(chunk);
    }
    chunks_[chunk].state = ChunkState::kSynced;
    chunks_[chunk].lane = kNoLane;
    for (; next != kNone && chunks_[next].is_free(); next = chunks_[chunk].next) {
      if (chunks_[next].is_synced()) remove_free(next);
      chunks_.absorb_next(chunk);
    }
    add_free(chunk);
  }
}

void Allocator::add_free(Index chunk) {
  const Record& record = chunks_[chunk];
  if (record.is_unsynced()) {
    unsynced_bytes_ += record.bytes;
    if (record.lane != kNoLane) unsynced_[record.lane].insert(chunks_, chunk);
  } else if (record.is_last()) {
    wilderness_ = chunk;
  } else {
    synced_.insert(chunks_, chunk);
  }
}

void Allocator::remove_free(Index chunk) {
  const Record& record = chunks_[chunk];
  if (record.is_unsynced()) {
    unsynced_bytes_ -= record.bytes;
    if (record.lane != kNoLane) unsynced_[record.lane].erase(chunks_, chunk);
  } else if (chunk == wilderness_) {
    wilderness_ = kNone;
  } else {
    synced_.erase(chunks_, chunk);
  }
}

}  // namespace waterflow
