#include "lane.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <sstream>
#include <utility>

namespace waterflow {
namespace {

thread_local LaneContext* active_lane = nullptr;

struct KnownArena {
  std::shared_ptr<Arena> arena;
  bool retired = false;
  std::map<JobId, std::string> names;
};

struct Registry {
  std::shared_mutex mutex;
  std::vector<KnownArena> arenas;

  KnownArena* find(const Arena* arena) {
    for (auto& known : arenas) {
      if (known.arena.get() == arena) return &known;
    }
    return nullptr;
  }
};

// Never destroyed: tensors may be freed while the interpreter shuts down.
Registry& registry() {
  static auto* instance = new Registry();
  return *instance;
}

c10::Allocator* fallback = nullptr;

std::pair<std::shared_ptr<Arena>, bool> owner_of(const void* pointer) {
  std::shared_lock lock(registry().mutex);
  for (auto& known : registry().arenas) {
    if (known.arena->owns(pointer)) return {known.arena, known.retired};
  }
  return {nullptr, false};
}

void drop_if_unused(const Arena* arena) {
  std::unique_lock lock(registry().mutex);
  auto& arenas = registry().arenas;
  auto unused = [arena](const KnownArena& known) {
    return known.arena.get() == arena && known.retired && known.arena->statistics().live == 0;
  };
  arenas.erase(std::remove_if(arenas.begin(), arenas.end(), unused), arenas.end());
}

void release_to_unknown_lane(void* pointer) {
  auto [arena, retired] = owner_of(pointer);
  if (!arena) {
    fallback->raw_deleter()(pointer);
    return;
  }
  arena->free(pointer, kNoLane);
  if (retired) drop_if_unused(arena.get());
}

std::string holdings(const Arena& arena, JobId asking) {
  std::ostringstream text;
  std::shared_lock lock(registry().mutex);
  auto* known = registry().find(&arena);
  if (known == nullptr) return "";
  for (auto& [job, name] : known->names) {
    text << (job == asking ? "; it holds " : "; job '" + name + "' holds ") << arena.held(job)
         << " bytes";
  }
  return text.str();
}

std::string name_of(const Arena& arena, JobId job) {
  std::shared_lock lock(registry().mutex);
  auto* known = registry().find(&arena);
  if (known == nullptr) return "?";
  auto found = known->names.find(job);
  return found == known->names.end() ? "?" : found->second;
}

[[noreturn]] void throw_out_of_memory(const LaneContext& lane, std::size_t bytes) {
  const Arena& arena = *lane.arena;
  const Statistics now = arena.statistics();
  TORCH_CHECK_WITH(OutOfMemoryError, false, "waterflow: out of memory: job '",
                   name_of(arena, lane.job), "' asked for ", bytes, " bytes; the budget is ",
                   now.capacity, " bytes, ", now.free, " are free, ", now.largest_free,
                   " of them in one piece", holdings(arena, lane.job),
                   ". Use a smaller batch for this job, a larger budget, or fewer jobs at once.");
  std::abort();  // unreachable: the check above throws
}

void* take_planned(LaneContext& lane, std::size_t bytes) {
  Script& script = *lane.script;
  constexpr std::size_t kAlignment = 64;
  const std::size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  if (script.cursor < script.bytes.size() && script.bytes[script.cursor] == rounded) {
    const std::size_t offset = script.offsets[script.cursor++];
    if (void* memory = lane.arena->allocate_at(offset, rounded, lane.lane, lane.job)) return memory;
  }
  ++script.deviations;
  const std::size_t offset = script.overflow->fetch_add(rounded);
  return lane.arena->allocate_at(offset, rounded, lane.lane, lane.job);
}

class LaneAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    if (active_lane == nullptr || bytes == 0) return fallback->allocate(bytes);
    void* memory = take_memory(*active_lane, bytes);
    return {memory, memory, &release_memory, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release_memory; }

  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
};

}  // namespace

LaneScope::LaneScope(LaneContext context) : context_(std::move(context)), outer_(active_lane) {
  active_lane = &context_;
}

LaneScope::~LaneScope() { active_lane = outer_; }

LaneContext* current_lane() { return active_lane; }

LaneContext* exchange_lane(LaneContext* lane) { return std::exchange(active_lane, lane); }

void install_lane_allocator() {
  static std::once_flag once;
  std::call_once(once, [] {
    fallback = c10::GetCPUAllocator();
    // Owned by the process from here on, as SetCPUAllocator demands.
    c10::SetCPUAllocator(new LaneAllocator(), /*priority=*/100);
  });
}

void register_arena(const std::shared_ptr<Arena>& arena) {
  std::unique_lock lock(registry().mutex);
  registry().arenas.push_back({arena, false, {}});
}

void retire_arena(const std::shared_ptr<Arena>& arena) {
  {
    std::unique_lock lock(registry().mutex);
    if (auto* known = registry().find(arena.get())) known->retired = true;
  }
  drop_if_unused(arena.get());
}

void set_job_name(const Arena& arena, JobId job, std::string name) {
  std::unique_lock lock(registry().mutex);
  if (auto* known = registry().find(&arena)) known->names[job] = std::move(name);
}

void release_memory(void* pointer) {
  if (pointer == nullptr) return;
  if (active_lane != nullptr && active_lane->arena->owns(pointer)) {
    active_lane->arena->free(pointer, active_lane->lane);
    return;
  }
  release_to_unknown_lane(pointer);
}

void* take_memory(LaneContext& lane, std::size_t bytes) {
  void* memory = lane.script != nullptr ? take_planned(lane, bytes)
                                        : lane.arena->allocate(bytes, lane.lane, lane.job);
  if (memory == nullptr) throw_out_of_memory(lane, bytes);
  return memory;
}

}  // namespace waterflow
