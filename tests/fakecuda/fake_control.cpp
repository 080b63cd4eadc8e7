// What tests do to the driver from outside: faults, delays, sizes, counts.
#include <algorithm>
#include <cstring>

#include "fake_driver.h"

namespace fake {
namespace {

// Naming every function also makes the linker complain about one that has no definition.
struct Symbol {
  const char* name;
  void (*function)();
};

#define FAKE_SYMBOL(symbol, ...) {#symbol, reinterpret_cast<void (*)()>(symbol)},
const Symbol kSymbols[] = {WATERFLOW_DRIVER_CALLS(FAKE_SYMBOL)};
#undef FAKE_SYMBOL

bool known(const char* name) {
  return std::any_of(std::begin(kSymbols), std::end(kSymbols), [&](const Symbol& symbol) {
    return std::strcmp(symbol.name, name) == 0 && symbol.function != nullptr;
  });
}

template <typename Values, typename Measure>
long long total(const Values& values, Measure measure) {
  long long sum = 0;
  for (const auto& value : values) sum += static_cast<long long>(measure(value));
  return sum;
}

long long live(const std::string& kind) {
  const State& fake = state();
  const Memory& memory = fake.memory;
  const auto itself = [](auto value) { return value; };
  if (kind == "contexts") return total(fake.retained, itself);
  if (kind == "pushed") return fake.pushed;
  if (kind == "reservations") return memory.reservations.size();
  if (kind == "handles") return memory.handles.size();
  if (kind == "mapped_bytes") {
    return total(memory.mappings, [](const auto& entry) { return entry.second.bytes; });
  }
  if (kind == "memory_bytes") return total(memory.used, itself);
  if (kind == "streams") return fake.streams.all().size();
  if (kind == "events") return fake.events.all().size();
  if (kind == "host_blocks") return memory.host_blocks.size();
  return -1;
}

// What is still queued when the process ends is dropped, as the real driver shuts down then.
struct Shutdown {
  ~Shutdown() {
    std::lock_guard<std::mutex> lock(state().mutex);
    state().break_context(kDeinitialized);
  }
} shutdown;

}  // namespace
}  // namespace fake

using namespace fake;

// Functions that return an int return 1 for names and numbers that mean nothing, else 0.
extern "C" {

// The `nth` call from now on, once.
int fake_fail(const char* symbol, int nth, int code) {
  std::lock_guard<std::mutex> lock(state().mutex);
  if (!known(symbol) || nth < 1 || code == cu::kSuccess) return 1;
  state().faults[symbol][state().calls[symbol] + nth] = code;
  return 0;
}

int fake_sticky(int code) {
  std::lock_guard<std::mutex> lock(state().mutex);
  if (code == cu::kSuccess) return 1;
  state().break_context(code);
  return 0;
}

int fake_break_after(int work_items, int code) {
  std::lock_guard<std::mutex> lock(state().mutex);
  if (work_items < 1 || code == cu::kSuccess) return 1;
  state().items_until_break = work_items;
  state().planned_break = code;
  return 0;
}

int fake_set_delay(int max_microseconds, unsigned seed) {
  std::lock_guard<std::mutex> lock(state().mutex);
  if (max_microseconds < 0) return 1;
  state().max_delay = max_microseconds;
  state().random.seed(seed);
  return 0;
}

// Streams begin no work item while they are held.
int fake_hold(int on) {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().held = on != 0;
  state().changed.notify_all();
  return 0;
}

int fake_set_memory(std::size_t total_bytes) {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().memory.total = total_bytes;
  return 0;
}

int fake_set_devices(int count) {
  std::lock_guard<std::mutex> lock(state().mutex);
  if (count < 0 || count > kMaxDevices) return 1;
  state().devices = count;
  return 0;
}

int fake_set_attribute(int attribute, int value) {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().attributes[attribute] = value;
  return 0;
}

// The lower the number, the greater the priority; both are equal where there are none.
int fake_set_priorities(int least, int greatest) {
  std::lock_guard<std::mutex> lock(state().mutex);
  if (greatest > least) return 1;
  state().least_priority = least;
  state().greatest_priority = greatest;
  return 0;
}

// Work items that were queued on streams of this priority.
long long fake_items(int priority) {
  std::lock_guard<std::mutex> lock(state().mutex);
  return state().items_by_priority[priority];
}

// Waits between streams do nothing any more, to show that a test would notice.
int fake_ignore_waits(int on) {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().ignores_waits = on != 0;
  return 0;
}

// -1 for a symbol that the driver does not have.
long long fake_calls(const char* symbol) {
  std::lock_guard<std::mutex> lock(state().mutex);
  return known(symbol) ? state().calls[symbol] : -1;
}

// -1 for a kind that there is not.
long long fake_live(const char* kind) {
  std::lock_guard<std::mutex> lock(state().mutex);
  return live(kind);
}

// Work items that are queued or under way.
long long fake_busy() {
  std::lock_guard<std::mutex> lock(state().mutex);
  return total(state().running,
               [](const auto& stream) { return stream->queued - stream->finished; });
}

// Faults, counters and settings; live objects and what is queued stay.
void fake_reset() {
  std::lock_guard<std::mutex> lock(state().mutex);
  State& fake = state();
  fake.calls.clear();
  fake.faults.clear();
  fake.attributes.clear();
  fake.broken = cu::kSuccess;
  fake.items_until_break = 0;
  fake.least_priority = 0;
  fake.greatest_priority = -5;
  fake.items_by_priority.clear();
  fake.ignores_waits = false;
  fake.max_delay = 0;
  fake.held = false;
  fake.changed.notify_all();
  fake.devices = 1;
  fake.memory.total = kDefaultMemory;
}

}  // extern "C"
