// The words that every part of the core shares: lanes, jobs, chunks, events and errors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace waterflow {

using Lane = int;                // 0 .. lanes - 1
using JobId = int;               // small and not negative
using LaneMask = std::uint64_t;  // bit l: lane l

inline constexpr Lane kNoLane = -1;  // a thread that is no lane, ordered with none before a sync
inline constexpr int kMaxLanes = 64;
inline constexpr LaneMask kEveryLane = ~LaneMask{0};
inline constexpr std::size_t kNoLimit = ~std::size_t{0};

// A thread that is no lane may run beside any lane, so it counts as all of them. With one lane
// this is still not the mask of lane 0, as that lane is not ordered with the thread either.
inline constexpr LaneMask mask_of(Lane lane) {
  return lane == kNoLane ? kEveryLane : LaneMask{1} << lane;
}

enum class ChunkState : std::uint8_t { kLive, kUnsynced, kSynced };

// A snapshot of one chunk. `lane` is the allocating lane of a live chunk, and the only lane that
// may take an unsynced one (kNoLane: nobody before a sync).
struct Chunk {
  std::size_t offset;
  std::size_t bytes;
  ChunkState state;
  LaneMask users;  // since the last sync
  JobId job;       // of a live chunk, else -1
  Lane lane;
};

// Copies between the arena and a slower tier run beside the lanes, on copiers, which are numbered
// from kFirstCopier on. Their events say what orders them:
//   kMark   a moment of a lane; `offset` is its number
//   kCopy   a copier copies the block at `offset`, behind the moment with the number `bytes` (0: it
//           is behind nothing but its own past)
//   kJoin   what the lane does next is behind all that the copier `offset` has done
inline constexpr int kFirstCopier = kMaxLanes;

enum class EventKind : std::uint8_t { kAlloc, kUse, kFree, kSync, kMark, kCopy, kJoin };

struct Event {
  std::uint64_t offset;
  std::uint64_t bytes;
  std::int32_t lane;
  std::int32_t job;
  EventKind kind;
};

// An offset or pointer at which no live chunk starts: a double free, or memory of someone else.
class UnknownChunk : public std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// The operating system or the device refused memory.
class BackendError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The allocator contradicts itself: a bug here, never the caller's fault.
class Inconsistent : public std::logic_error {
  using std::logic_error::logic_error;
};

}  // namespace waterflow
