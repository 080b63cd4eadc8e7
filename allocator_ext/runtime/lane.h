// A lane is a thread that executes a job's work. While a lane runs, every tensor that PyTorch makes
// on its thread and on the arena's kind of device comes from the arena; all other threads, and
// tensors elsewhere, keep PyTorch's own allocators.
#pragma once

#include <c10/core/Allocator.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/arena/arena.h"
#include "core/plan/memory_plan.h"

namespace waterflow {

struct CopyOrder;

struct LaneContext {
  std::shared_ptr<Arena> arena;
  Lane lane = 0;
  JobId job = 0;
  MemoryPlan* plan = nullptr;
  // Asked for room where the arena has none; then the request is made once more.
  std::shared_ptr<const std::function<bool(std::size_t)>> more = nullptr;
  // Called before each instruction of a tape: who goes first may be in need of the time.
  const std::function<void()>* pause = nullptr;
  // At a move whose copy is ordered by whoever queues the step: what the driver was told of it.
  const CopyOrder* order = nullptr;
  // Of which the arena's memory is a part, set aside, if it is: errors tell of the whole.
  std::shared_ptr<Arena> whole = nullptr;
};

// Makes the calling thread a lane for its lifetime; scopes nest, the innermost counts.
class LaneScope {
 public:
  explicit LaneScope(LaneContext context);
  ~LaneScope();
  LaneScope(const LaneScope&) = delete;
  LaneScope& operator=(const LaneScope&) = delete;

 private:
  LaneContext context_;
  LaneContext* outer_;
};

LaneContext* current_lane();
// The calling thread's lane if tensors of this kind come from its arena, else nullptr.
LaneContext* lane_for(TensorKind tensors);
// Replaces the calling thread's lane and returns the former one; nullptr: no lane.
LaneContext* exchange_lane(LaneContext* lane);

// Puts the lane-aware allocator in front of PyTorch's CPU allocator, once per process.
void install_lane_allocator();

// Arenas whose memory tensors may hold. A retired arena lives on until its last tensor is gone, and
// no thread is a lane of it that could make another.
void register_arena(const std::shared_ptr<Arena>& arena);
void retire_arena(const std::shared_ptr<Arena>& arena);

// For messages: what the user calls the job.
void set_job_name(const Arena& arena, JobId job, std::string name);

// Takes arena memory for `lane`; throws c10::OutOfMemoryError that says who holds what.
void* take_memory(LaneContext& lane, std::size_t bytes);
// The deleter of every tensor whose memory is an arena's: it returns there, keyed by the lane that
// frees it.
void release_memory(void* pointer);
// Whether the pointer was some arena's, to which it has then returned.
bool release_if_in_arena(void* pointer);
// Whether some arena's memory lies at the pointer.
bool is_in_arena(const void* pointer);

// How PyTorch itself takes memory on a kind of device. The host's is known; the CUDA part of the
// extension, where it is built, tells the device's.
struct OrdinaryMemory {
  c10::DataPtr (*allocate)(std::size_t bytes, c10::Device device) = nullptr;
  c10::DeleterFnPtr deleter = nullptr;  // by which ordinary memory is known
  // Host memory that the device writes while the host goes on; null for the host itself.
  c10::DataPtr (*page_locked)(std::size_t bytes) = nullptr;
};
void set_ordinary_memory(c10::DeviceType type, OrdinaryMemory memory);
const OrdinaryMemory& ordinary_memory(c10::DeviceType type);

}  // namespace waterflow
