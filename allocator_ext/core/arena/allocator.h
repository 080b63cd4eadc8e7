// The allocator: offsets in an arena of a fixed capacity, shared by lanes that run concurrently.
//
// A chunk is live, unsynced-free or synced-free. A lane may take what it alone used since the last
// sync at once, since a lane runs in order; what other lanes used only after a sync. Synced chunks
// never merge into unsynced ones early: that would withdraw them from the other lanes.
//
// Pure address arithmetic: no memory is touched, and a copy is a state to rehearse on. Not
// thread-safe; Arena adds the lock and the memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "core/arena/checksum.h"
#include "core/arena/chunk_list.h"
#include "core/arena/free_set.h"
#include "core/arena/offset_map.h"
#include "core/arena/types.h"

namespace waterflow {

struct Options {
  std::size_t capacity = 0;    // rounded down to the alignment
  std::size_t alignment = 64;  // a power of two
  int lanes = 2;
};

class Allocator {
 public:
  explicit Allocator(const Options& options);

  // The offset of `bytes` (rounded up to the alignment) for a lane and a job, or nothing: the job
  // is at its limit, or no range fits, even after a sync if one is allowed.
  std::optional<std::size_t> allocate(std::size_t bytes, Lane lane, JobId job,
                                      bool may_sync = true);
  // Planned placement: true iff the range is free and the lane may take all of it without a sync.
  bool allocate_at(std::size_t offset, std::size_t bytes, Lane lane, JobId job);
  // A lane other than the allocating one touches a live chunk. Throws UnknownChunk.
  void use(std::size_t offset, Lane lane);
  // Returns the job that held the chunk. Throws UnknownChunk.
  JobId free(std::size_t offset, Lane lane);
  // The caller states that the lanes have waited for each other.
  void synchronize();
  // Called before a sync that a request forces: makes the lanes wait. A copy does not inherit it.
  void set_sync_hook(std::function<void()> hook) { attached_.sync_hook = std::move(hook); }

  void set_limit(JobId job, std::size_t bytes);
  std::size_t limit(JobId job) const { return account(job).limit; }
  std::size_t held(JobId job) const { return account(job).held; }
  std::size_t peak(JobId job) const { return account(job).peak; }

  std::size_t live() const { return live_; }
  std::size_t peak() const { return peak_; }
  std::size_t extent() const { return extent_; }  // highest end of a live chunk so far
  std::size_t capacity() const { return capacity_; }
  std::size_t alignment() const { return std::size_t{1} << unit_shift_; }
  int lanes() const { return static_cast<int>(unsynced_.size()); }
  std::size_t free_bytes() const { return capacity_ - live_; }
  std::size_t largest_free() const;  // what a request could get after a sync
  std::uint64_t allocations() const { return allocations_; }
  std::uint64_t forced_syncs() const { return forced_syncs_; }
  std::uint64_t explicit_syncs() const { return explicit_syncs_; }
  std::uint64_t syncs() const { return forced_syncs_ + explicit_syncs_; }
  void reset_peaks();            // peaks and extent restart from what is live now
  std::size_t live_end() const;  // the end of the highest live chunk
  // One number for the capacity and for where live chunks lie: equal while these are the same, and
  // again when they are the same again. Whoever has placed blocks around what was live may ask by
  // it whether the places still hold.
  std::uint64_t version() const { return live_checksum_ ^ scrambled(capacity_); }

  std::optional<Chunk> find(std::size_t offset) const;  // the live chunk that starts there
  std::vector<Chunk> chunks() const;                    // in address order

  // Grows, or shrinks if the range above is synced-free; false changes nothing.
  bool resize(std::size_t capacity);

  // The event log, for the checker. Switching it on logs the live chunks as allocated by no lane;
  // synchronize() next, or their reuse looks like a race. A copy does not inherit it.
  void record(bool on);
  bool records() const { return attached_.recording; }
  // What orders copies beside the lanes; it changes nothing here.
  void note(EventKind kind, Lane lane, std::size_t offset, std::size_t bytes) {
    log(kind, lane, -1, offset, bytes);
  }
  std::vector<Event> take_log();

  std::size_t rounded(std::size_t bytes) const {
    return (bytes + alignment() - 1) & ~(alignment() - 1);
  }
  void check_consistency() const;  // throws Inconsistent; for tests, linear in the chunks

 private:
  struct Account {
    std::size_t held = 0;
    std::size_t peak = 0;
    std::size_t limit = kNoLimit;
  };
  // What a copy must not inherit: a rehearsal would stall the device or write into this log.
  struct Attached {
    Attached() = default;
    Attached(const Attached&) {}
    Attached& operator=(const Attached&) { return *this = Attached(); }
    Attached(Attached&&) = default;
    Attached& operator=(Attached&&) = default;
    std::function<void()> sync_hook;
    bool recording = false;
    std::vector<Event> log;
  };

  void check_request(std::size_t bytes, Lane lane, JobId job) {
    if (bytes == 0) reject_bytes();
    check_lane(lane);
    if (static_cast<std::size_t>(job) >= accounts_.size()) open_account(job);
  }
  void check_lane(Lane lane) const {
    if (lane < kNoLane || lane >= lanes()) reject_lane(lane);
  }
  [[noreturn]] static void reject_bytes();
  [[noreturn]] void reject_lane(Lane lane) const;
  Account& open_account(JobId job);
  Account account(JobId job) const;
  // A limit may be set below what the job holds; it then gets nothing until it has shrunk.
  bool within_limit(JobId job, std::size_t bytes) const {
    const Account& account = accounts_[job];
    return account.held <= account.limit && bytes <= account.limit - account.held;
  }

  Chunk snapshot_of(Index chunk) const;
  void check_chunks() const;
  void check_sets() const;
  void check_accounts() const;

  Index find_unsynced(std::size_t bytes, Lane lane) const;
  Index find_synced(std::size_t bytes) const;
  bool sync_may_help(std::size_t bytes) const;
  bool is_usable(Index first, std::size_t end, Lane lane) const;
  Index carve(Index first, std::size_t offset, std::size_t bytes);
  std::size_t make_live(Index chunk, Lane lane, JobId job);
  Index live_at(std::size_t offset) const;
  void add_users(Record& record, LaneMask users);
  static Lane key_of(const Record& record);
  void coalesce(Index chunk);
  void merge_unsynced();

  void add_free(Index chunk);  // into its set, merging with nothing
  void remove_free(Index chunk);
  void log(EventKind kind, Lane lane, JobId job, std::size_t offset, std::size_t bytes) {
    if (attached_.recording) attached_.log.push_back({offset, bytes, lane, job, kind});
  }

  int unit_shift_;
  std::size_t capacity_;
  ChunkList chunks_;
  OffsetMap live_chunks_;
  std::vector<FreeSet> unsynced_;  // by lane; chunks that nobody may take are in no set
  FreeSet synced_;
  Index wilderness_ = kNone;  // the synced chunk that ends at the capacity; in no set
  std::vector<Account> accounts_;
  std::uint64_t epoch_ = 1;
  std::size_t unsynced_bytes_ = 0;
  std::size_t live_ = 0;
  std::uint64_t live_checksum_ = 0;  // of the live chunks' offsets and bytes
  std::size_t peak_ = 0;
  std::size_t extent_ = 0;
  std::uint64_t allocations_ = 0;
  std::uint64_t forced_syncs_ = 0;
  std::uint64_t explicit_syncs_ = 0;
  Attached attached_;
};

}  // namespace waterflow
