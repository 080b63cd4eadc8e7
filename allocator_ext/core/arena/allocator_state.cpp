// What the allocator tells about itself: accounts, limits, snapshots, the log, consistency; and
// the change of its capacity. The placement itself is in allocator.cpp.
#include <algorithm>
#include <string>
#include <utility>

#include "core/arena/allocator.h"

namespace waterflow {
namespace {

constexpr JobId kMaxJobs = 1 << 20;  // accounts are a plain vector

void expect(bool holds, const char* sentence, std::size_t offset) {
  if (!holds) throw Inconsistent(std::string(sentence) + ", at offset " + std::to_string(offset));
}

}  // namespace

void Allocator::reject_bytes() {
  throw std::invalid_argument("a request for 0 bytes needs no chunk");
}

void Allocator::reject_lane(Lane lane) const {
  throw std::invalid_argument("lane " + std::to_string(lane) + " is none of the " +
                              std::to_string(lanes()) + " lanes (or -1 for no lane)");
}

Allocator::Account& Allocator::open_account(JobId job) {
  if (job < 0 || job >= kMaxJobs) {
    throw std::invalid_argument("a job id is 0 to " + std::to_string(kMaxJobs - 1) + ", not " +
                                std::to_string(job));
  }
  if (static_cast<std::size_t>(job) >= accounts_.size()) accounts_.resize(job + 1);
  return accounts_[job];
}

Allocator::Account Allocator::account(JobId job) const {
  const bool known = job >= 0 && static_cast<std::size_t>(job) < accounts_.size();
  return known ? accounts_[job] : Account{};
}

void Allocator::set_limit(JobId job, std::size_t bytes) { open_account(job).limit = bytes; }

std::size_t Allocator::largest_free() const {
  std::size_t largest = 0;
  std::size_t run = 0;
  for (Index chunk = chunks_.head(); chunk != kNone; chunk = chunks_[chunk].next) {
    run = chunks_[chunk].is_free() ? run + chunks_[chunk].bytes : 0;
    largest = std::max(largest, run);
  }
  return largest;
}

void Allocator::reset_peaks() {
  peak_ = live_;
  for (Account& account : accounts_) account.peak = account.held;
  extent_ = live_end();
}

std::size_t Allocator::live_end() const {
  Index top = chunks_.tail();
  while (top != kNone && chunks_[top].is_free()) top = chunks_[top].prev;
  return top == kNone ? 0 : chunks_[top].end();
}

Chunk Allocator::snapshot_of(Index chunk) const {
  const Record& record = chunks_[chunk];
  return {record.offset,           record.bytes, record.state,
          record.users_in(epoch_), record.job,   record.lane};
}

std::optional<Chunk> Allocator::find(std::size_t offset) const {
  const Index chunk = live_chunks_.find(offset);
  if (chunk == kNone) return std::nullopt;
  return snapshot_of(chunk);
}

std::vector<Chunk> Allocator::chunks() const {
  std::vector<Chunk> result;
  result.reserve(chunks_.size());
  for (Index chunk = chunks_.head(); chunk != kNone; chunk = chunks_[chunk].next) {
    result.push_back(snapshot_of(chunk));
  }
  return result;
}

bool Allocator::resize(std::size_t capacity) {
  capacity = capacity >> unit_shift_ << unit_shift_;
  if (capacity == 0) return false;
  const Index tail = chunks_.tail();
  if (capacity < capacity_ && (wilderness_ == kNone || chunks_[tail].offset > capacity)) {
    return false;
  }
  if (wilderness_ != kNone && chunks_[tail].offset == capacity) {
    wilderness_ = kNone;
    chunks_.drop_tail();
  } else if (wilderness_ != kNone) {
    chunks_.stretch_tail(capacity);
  } else if (capacity > capacity_) {
    chunks_.append(capacity - capacity_);
    add_free(chunks_.tail());
  }
  capacity_ = capacity;
  return true;
}

void Allocator::record(bool on) {
  if (on && !attached_.recording) {
    attached_.log.clear();
    for (const Chunk& chunk : chunks()) {
      if (chunk.state != ChunkState::kLive) continue;
      attached_.log.push_back({chunk.offset, chunk.bytes, kNoLane, chunk.job, EventKind::kAlloc});
    }
  }
  attached_.recording = on;
}

std::vector<Event> Allocator::take_log() { return std::exchange(attached_.log, {}); }

void Allocator::check_consistency() const {
  check_chunks();
  check_sets();
  check_accounts();
}

void Allocator::check_chunks() const {
  std::size_t end = 0;
  std::size_t count = 0;
  Index below = kNone;
  for (Index chunk = chunks_.head(); chunk != kNone; chunk = chunks_[chunk].next) {
    const Record& record = chunks_[chunk];
    expect(record.offset == end && record.bytes > 0, "chunks do not tile the arena", end);
    expect(record.bytes % alignment() == 0, "a chunk is not aligned", end);
    expect(record.prev == below, "a link backwards is wrong", end);
    expect(below == kNone || !chunks_[below].merges_with(record), "neighbours did not merge", end);
    expect(
        chunks_.containing(record.offset) == chunk && chunks_.containing(record.end() - 1) == chunk,
        "the index by address is wrong", end);
    const Index live = live_chunks_.find(record.offset);
    expect(live == (record.is_live() ? chunk : kNone), "the map of live chunks is wrong", end);
    end = record.end();
    below = chunk;
    ++count;
  }
  expect(end == capacity_ && below == chunks_.tail(), "chunks do not end at the capacity", end);
  expect(count == chunks_.size(), "a chunk record leaked", end);
}

void Allocator::check_sets() const {
  std::vector<std::size_t> in_lane(unsynced_.size());
  std::size_t synced = 0;
  for (Index chunk = chunks_.head(); chunk != kNone; chunk = chunks_[chunk].next) {
    const Record& record = chunks_[chunk];
    const bool in_set = record.is_synced() && !record.is_last();
    synced += in_set;
    if (record.is_unsynced() && record.lane != kNoLane) ++in_lane[record.lane];
    expect((chunk == wilderness_) == (record.is_synced() && record.is_last()),
           "the untouched tail is not where it should be", record.offset);
  }
  expect(synced_.check(chunks_) == synced, "the synced set lost a chunk", 0);
  for (std::size_t lane = 0; lane < unsynced_.size(); ++lane) {
    expect(unsynced_[lane].check(chunks_) == in_lane[lane], "an unsynced set lost a chunk", 0);
  }
}

void Allocator::check_accounts() const {
  std::vector<std::size_t> held(accounts_.size());
  std::size_t live = 0;
  std::size_t unsynced = 0;
  std::size_t live_chunks = 0;
  std::uint64_t checksum = 0;
  for (Index chunk = chunks_.head(); chunk != kNone; chunk = chunks_[chunk].next) {
    const Record& record = chunks_[chunk];
    if (record.is_unsynced()) unsynced += record.bytes;
    if (record.is_free()) continue;
    held[record.job] += record.bytes;
    live += record.bytes;
    checksum += scrambled(record.offset, record.bytes);
    ++live_chunks;
  }
  expect(checksum == live_checksum_, "the checksum of what is live is wrong", live);
  expect(live == live_ && live_ <= peak_, "live bytes are wrong", live);
  expect(unsynced == unsynced_bytes_, "unsynced bytes are wrong", unsynced);
  expect(live_chunks == live_chunks_.size(), "the map of live chunks has strangers", live_chunks);
  for (std::size_t job = 0; job < held.size(); ++job) {
    expect(held[job] == accounts_[job].held && held[job] <= accounts_[job].peak,
           "a job's account is wrong", job);
  }
}

}  // namespace waterflow
