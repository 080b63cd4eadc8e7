#include "runtime/lane.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
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
  std::map<JobId, std::string> names;
};

struct Registry {
  std::shared_mutex mutex;  // guards the list, and the names; the arenas have locks of their own
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

std::shared_ptr<Arena> owner_of(const void* pointer) {
  std::shared_lock lock(registry().mutex);
  for (auto& known : registry().arenas) {
    if (known.arena->owns(pointer)) return known.arena;
  }
  return nullptr;
}

void drop_if_unused(const Arena* arena) {
  std::unique_lock lock(registry().mutex);
  auto& arenas = registry().arenas;
  auto unused = [arena](const KnownArena& known) {
    return known.arena.get() == arena && known.arena->may_go();
  };
  arenas.erase(std::remove_if(arenas.begin(), arenas.end(), unused), arenas.end());
}

// Of a retired one whose tensors were gone before somebody makes new ones.
void keep_known(const std::shared_ptr<Arena>& arena) {
  std::unique_lock lock(registry().mutex);
  if (registry().find(arena.get()) == nullptr) registry().arenas.push_back({arena, {}});
}

bool release_to_unknown_lane(void* pointer) {
  const auto arena = owner_of(pointer);
  if (!arena) return false;
  arena->free(pointer, kNoLane);
  if (arena->is_retired()) drop_if_unused(arena.get());
  return true;
}

// The deleter of the host's lane allocator, which may be asked to free what the standard one made.
void release_host_memory(void* pointer) {
  if (pointer != nullptr && !release_if_in_arena(pointer)) fallback->raw_deleter()(pointer);
}

c10::DataPtr allocate_on_host(std::size_t bytes, c10::Device) {
  return c10::GetDefaultCPUAllocator()->allocate(bytes);
}

constexpr std::size_t kDeviceTypes = static_cast<std::size_t>(c10::COMPILE_TIME_MAX_DEVICE_TYPES);

std::array<OrdinaryMemory, kDeviceTypes>& ordinary_memories() {
  static std::array<OrdinaryMemory, kDeviceTypes> memories = [] {
    std::array<OrdinaryMemory, kDeviceTypes> initial{};
    initial[static_cast<std::size_t>(c10::DeviceType::CPU)] = {
        &allocate_on_host, c10::GetDefaultCPUAllocator()->raw_deleter()};
    return initial;
  }();
  return memories;
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
  const Arena& arena = lane.whole ? *lane.whole : *lane.arena;
  const Statistics now = arena.statistics();
  const std::size_t limit = arena.limit(lane.job);
  std::ostringstream limited;
  if (limit < now.capacity) limited << "its memory_limit is " << limit << " bytes, ";
  TORCH_CHECK_WITH(OutOfMemoryError, false, "waterflow: out of memory: job '",
                   name_of(arena, lane.job), "' asked for ", bytes, " bytes; ", limited.str(),
                   "the budget is ", now.capacity, " bytes, ", now.free, " are free, ",
                   now.largest_free, " of them in one piece", holdings(arena, lane.job),
                   ". Use a smaller batch for this job, a larger ",
                   limited.str().empty() ? "budget" : "limit", ", or fewer jobs at once.");
  std::abort();  // unreachable: the check above throws
}

class LaneAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    LaneContext* lane = bytes == 0 ? nullptr : lane_for(TensorKind::kHost);
    if (lane == nullptr) return fallback->allocate(bytes);
    void* memory = take_memory(*lane, bytes);
    return {memory, memory, &release_host_memory, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release_host_memory; }

  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
};

}  // namespace

LaneScope::LaneScope(LaneContext context) : context_(std::move(context)), outer_(active_lane) {
  context_.arena->enter();
  if (context_.arena->is_retired()) keep_known(context_.arena);
  active_lane = &context_;
}

LaneScope::~LaneScope() {
  active_lane = outer_;
  const bool is_last = context_.arena->leave();
  if (is_last && context_.arena->is_retired()) drop_if_unused(context_.arena.get());
}

LaneContext* current_lane() { return active_lane; }

LaneContext* lane_for(TensorKind tensors) {
  const bool serves = active_lane != nullptr && active_lane->arena->tensors() == tensors;
  return serves ? active_lane : nullptr;
}

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
  registry().arenas.push_back({arena, {}});
}

void retire_arena(const std::shared_ptr<Arena>& arena) {
  arena->retire();
  drop_if_unused(arena.get());
}

void set_job_name(const Arena& arena, JobId job, std::string name) {
  std::unique_lock lock(registry().mutex);
  if (auto* known = registry().find(&arena)) known->names[job] = std::move(name);
}

void release_memory(void* pointer) { release_if_in_arena(pointer); }

bool release_if_in_arena(void* pointer) {
  if (active_lane == nullptr || !active_lane->arena->owns(pointer)) {
    return release_to_unknown_lane(pointer);
  }
  LaneContext& lane = *active_lane;
  const bool was_own = lane.plan != nullptr && lane.plan->release(*lane.arena, pointer);
  if (!was_own) lane.arena->free(pointer, lane.lane);
  return true;
}

bool is_in_arena(const void* pointer) { return owner_of(pointer) != nullptr; }

void set_ordinary_memory(c10::DeviceType type, OrdinaryMemory memory) {
  ordinary_memories()[static_cast<std::size_t>(type)] = memory;
}

const OrdinaryMemory& ordinary_memory(c10::DeviceType type) {
  return ordinary_memories()[static_cast<std::size_t>(type)];
}

void* take_memory(LaneContext& lane, std::size_t bytes) {
  void* memory = lane.plan != nullptr ? lane.plan->take(*lane.arena, bytes, lane.lane)
                                      : lane.arena->allocate(bytes, lane.lane, lane.job);
  if (memory == nullptr && lane.more && (*lane.more)(bytes)) {
    memory = lane.arena->allocate(bytes, lane.lane, lane.job);
  }
  if (memory == nullptr) throw_out_of_memory(lane, bytes);
  return memory;
}

}  // namespace waterflow
