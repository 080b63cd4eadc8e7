// A budget of memory that threads share: an allocator, a backend and one lock. Pointers, not
// offsets. Whoever frees says on which lane, as the lane that frees need not be the one that
// allocated.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/arena/allocator.h"
#include "core/arena/backend.h"
#include "core/arena/live_bytes.h"
#include "core/arena/patient_mutex.h"
#include "core/arena/timeline.h"
#include "core/arena/types.h"

namespace waterflow {

// Which tensors that a lane makes come from the arena. All others are PyTorch's own business, such
// as the host tensors of a job on a GPU.
enum class TensorKind { kHost, kCuda };

struct Statistics {
  std::size_t capacity;
  std::size_t taken;  // memory of the host or the device that stands behind it
  std::size_t live;
  std::size_t peak;
  std::size_t extent;
  std::size_t free;
  std::size_t largest_free;
  std::uint64_t allocations;
  std::uint64_t forced_syncs;
  std::uint64_t explicit_syncs;
};

class Arena {
 public:
  // `options.capacity` is ignored: the backend has it. See core/device/arenas.h.
  Arena(std::unique_ptr<Backend> backend, Options options, TensorKind tensors = TensorKind::kHost);
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // nullptr when nothing fits or the job is at its limit.
  void* allocate(std::size_t bytes, Lane lane, JobId job, bool may_sync = true);
  // nullptr unless exactly this range is free for the lane without a sync.
  void* allocate_at(std::size_t offset, std::size_t bytes, Lane lane, JobId job);
  void use(const void* pointer, Lane lane);
  void free(void* pointer, Lane lane);
  void synchronize();  // the lanes wait for each other, asynchronously where the backend can
  void finish();       // the host waits for the lanes
  // Moves bytes into, within or out of the arena while no lane is at work.
  void copy(void* target, const void* source, std::size_t bytes);
  void copy_all(const std::vector<CopyOf>& copies);

  // Blocks of a rehearsed plan need no search, and nobody else takes their places: a lane keeps
  // them itself, and only their bytes are counted here, without the lock.
  LiveBytes& live_bytes() { return live_bytes_; }
  // What one job's plan has come to, when the round is over: its own peak, the plan's end, and
  // samples (seconds of the steady clock, bytes held) for the timeline.
  void close_plan(JobId job, std::size_t peak, std::size_t extent,
                  const std::vector<std::pair<double, std::size_t>>& samples);

  // Threads whose tensors come from here are in it, whatever becomes of it meanwhile; the last one
  // out is told so.
  void enter() { inside_.fetch_add(1); }
  bool leave() { return inside_.fetch_sub(1) == 1; }
  // It serves nobody new: once nobody is in it and nothing in use, it may go.
  void retire() { retired_.store(true); }
  bool is_retired() const { return retired_.load(); }
  bool may_go() const { return is_retired() && inside_.load() == 0 && statistics().live == 0; }

  // Without the lock: any thread may ask about any pointer at any time.
  bool owns(const void* pointer) const {
    return reinterpret_cast<std::uintptr_t>(pointer) - base_ <
           capacity_.load(std::memory_order_relaxed);
  }
  std::size_t offset_of(const void* pointer) const;  // throws UnknownChunk unless owned
  void* pointer_to(std::size_t offset) const { return reinterpret_cast<void*>(base_ + offset); }
  std::optional<Chunk> find(const void* pointer) const;  // the live chunk that starts there
  bool has_memory() const { return backend_->base() != nullptr; }
  TensorKind tensors() const { return tensors_; }
  std::size_t alignment() const { return allocator_.alignment(); }
  std::size_t capacity() const { return capacity_.load(std::memory_order_relaxed); }

  void commit();  // takes memory that was only reserved so far; throws BackendError
  bool resize(std::size_t capacity);
  // Gives back all memory above the highest live chunk. For an arena that serves no one any more.
  void give_back();
  // From now on a request that finds no place makes the arena grow, by `step` bytes at least.
  void set_growth(std::size_t step);
  void set_limit(JobId job, std::size_t bytes);
  std::size_t limit(JobId job) const;
  std::size_t held(JobId job) const;
  std::size_t peak(JobId job) const;
  Statistics statistics() const;
  void reset_peaks();
  std::size_t live_end() const;
  std::uint64_t version()
      const;  // as the allocator's; blocks that steps keep themselves do not count

  Allocator snapshot() const;  // to rehearse on
  void record(bool on);
  // Adds what orders a copy to the log, if there is one: see EventKind.
  void note(EventKind kind, Lane lane, std::size_t offset, std::size_t bytes);
  std::vector<Event> take_log();
  Timeline timeline() const;
  void enable_timeline(bool on);
  void clear_timeline();

 private:
  void* granted(std::size_t offset, JobId job);
  bool resize_locked(std::size_t capacity);
  void fixed_changed() { live_bytes_.set_fixed(allocator_.live()); }

  // Guards the backend's memory, the allocator and all that follows up to the timeline. What is
  // constant, or atomic, is read without it; copy() and finish() are for when no lane is at work.
  mutable PatientMutex mutex_;
  std::unique_ptr<Backend> backend_;
  const std::uintptr_t base_;
  Allocator allocator_;
  const TensorKind tensors_;
  std::size_t growth_ = 0;
  std::atomic<std::size_t> capacity_;  // the allocator's, for those without the lock
  std::atomic<int> inside_{0};         // threads, each as often as it is in
  std::atomic<bool> retired_{false};
  std::size_t planned_extent_ = 0;
  std::vector<std::size_t> planned_job_peaks_;
  Timeline timeline_;
  LiveBytes live_bytes_;
};

}  // namespace waterflow
