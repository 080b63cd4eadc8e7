// A CUDA driver made of host memory and threads, for machines without a GPU. It is loaded in place
// of libcuda.so.1 and keeps to what cuda.h documents where a program could tell the difference:
//
//  - device memory is memory files mapped at reserved host addresses; without cuMemMap and
//    cuMemSetAccess an address is not accessible;
//  - each stream is a thread that works off a queue, in order and at its own pace, so that missing
//    waits between streams show as wrong data;
//  - where the documentation leaves a case open, this driver refuses it.
//
// It does not model kernels, pageable memory (every host buffer counts as pinned: the source of a
// copy is read when the copy runs) and the default stream's implicit waits.
//
// One mutex guards the whole state. Workers hold it except while they sleep, copy, or run a host
// function.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/device/driver.h"

namespace cu = waterflow::cu;

// The definitions must agree with these, so the compiler compares them with the list.
#define FAKE_DECLARE(symbol, ...) extern "C" cu::Result symbol(__VA_ARGS__);
WATERFLOW_DRIVER_CALLS(FAKE_DECLARE)
#undef FAKE_DECLARE

namespace fake {

inline constexpr cu::Result kInvalidValue = 1;
inline constexpr cu::Result kNotInitialized = 3;
inline constexpr cu::Result kDeinitialized = 4;
inline constexpr cu::Result kNoDevice = 100;
inline constexpr cu::Result kInvalidDevice = 101;
inline constexpr cu::Result kInvalidContext = 201;
inline constexpr cu::Result kOperatingSystem = 304;
inline constexpr cu::Result kInvalidHandle = 400;
inline constexpr cu::Result kIllegalAddress = 700;
inline constexpr cu::Result kContextIsDestroyed = 709;
inline constexpr cu::Result kNotPermitted = 800;

inline constexpr int kMaxDevices = 16;
inline constexpr std::size_t kGranularity = std::size_t{2} << 20;
inline constexpr std::size_t kDefaultMemory = std::size_t{256} << 20;

// Objects by handles that are never used twice, so that a stale handle is always found out.
template <typename Handle, typename Object>
class Table {
 public:
  Handle add(std::shared_ptr<Object> object) {
    const Handle handle = reinterpret_cast<Handle>(++last_);
    objects_.emplace(handle, std::move(object));
    return handle;
  }
  std::shared_ptr<Object> find(Handle handle) const {
    const auto found = objects_.find(handle);
    return found == objects_.end() ? nullptr : found->second;
  }
  std::shared_ptr<Object> take(Handle handle) {
    std::shared_ptr<Object> object = find(handle);
    objects_.erase(handle);
    return object;
  }
  const std::map<Handle, std::shared_ptr<Object>>& all() const { return objects_; }

 private:
  std::map<Handle, std::shared_ptr<Object>> objects_;
  std::uintptr_t last_ = 0x1000;
};

// The bytes behind a memory handle. They live as long as the handle or a mapping holds them.
struct Physical {
  Physical(int file, cu::Device device, std::size_t bytes);
  ~Physical();
  Physical(const Physical&) = delete;
  Physical& operator=(const Physical&) = delete;

  const int file;
  const cu::Device device;
  const std::size_t bytes;
};

struct Mapping {
  std::size_t bytes;
  std::shared_ptr<Physical> physical;
  int protection;
};

struct Memory {
  std::size_t total = kDefaultMemory;  // of each device
  std::array<std::size_t, kMaxDevices> used{};
  std::map<cu::DevicePointer, std::size_t> reservations;
  std::map<cu::MemoryHandle, std::shared_ptr<Physical>> handles;
  cu::MemoryHandle last_handle = 0x2000;
  std::map<void*, std::size_t> host_blocks;
  std::map<cu::DevicePointer, Mapping> mappings;
  // Taken by copies to read `mappings` and the memory behind them, without the state's mutex; taken
  // alone, on top of the state's mutex, to change `mappings`.
  std::shared_mutex in_use;

  // An address that is not the host's.
  bool reserved(cu::DevicePointer pointer) const;
  bool accessible(cu::DevicePointer pointer, std::size_t bytes, int protection) const;
};

// One execution of cuEventRecord.
struct Record {
  bool done = false;
  std::chrono::steady_clock::time_point at;
};

struct EventObject {
  cu::Device device;
  bool timed;
  std::shared_ptr<Record> latest;  // null before the first cuEventRecord
  bool lost = false;               // its context went away first: still counted, never usable
};

struct Work {
  std::function<cu::Result()> run;  // a result other than success breaks the context
  std::shared_ptr<Record> record;   // of an event record, else null
  std::uint64_t epoch;
};

struct StreamObject {
  cu::Device device;
  std::deque<Work> queue;
  std::uint64_t queued = 0;
  std::uint64_t finished = 0;
  int priority = 0;
  bool closing = false;
  bool lost = false;

  bool idle() const { return queued == finished; }
};

struct State {
  std::mutex mutex;
  std::condition_variable changed;

  bool initialised = false;
  int devices = 1;
  std::map<int, int> attributes;
  std::array<int, kMaxDevices> retained{};
  long pushed = 0;

  Memory memory;
  Table<cu::Stream, StreamObject> streams;
  Table<cu::Event, EventObject> events;
  std::array<std::shared_ptr<StreamObject>, kMaxDevices> default_streams;
  std::vector<std::shared_ptr<StreamObject>> running;  // every stream that still has its thread

  std::map<std::string, long> calls;
  std::map<std::string, std::map<long, cu::Result>> faults;  // by symbol, by number of its call
  cu::Result broken = cu::kSuccess;
  cu::Result last_break = cu::kSuccess;
  std::uint64_t epoch = 0;  // grows when the context breaks: older work is dropped
  long items_until_break = 0;
  cu::Result planned_break = cu::kSuccess;

  int least_priority = 0;
  int greatest_priority = -5;
  std::map<int, long> items_by_priority;  // queued since the last reset

  bool ignores_waits = false;
  int max_delay = 0;  // microseconds
  bool held = false;  // streams begin nothing
  std::mt19937 random;

  bool valid(cu::Device device) const { return device >= 0 && device < devices; }
  void break_context(cu::Result code);
  void count_item();
  std::chrono::microseconds next_delay();
  // Sleeps until `reached` or until the context breaks, and returns the break's code then.
  cu::Result wait(std::unique_lock<std::mutex>& lock, const std::function<bool()>& reached);
};

// Never destroyed: workers may outlive the static objects.
State& state();

// The device of the thread's current context, else -1.
cu::Device current_device();

// True on a worker's thread while it runs a host function, which must not call the driver.
bool& in_host_function();

enum class Needs {
  kNothing,  // works even on a broken context
  kLibrary,
  kInit,
  kContext,
};

// A call of the driver, from its first line to its return: counted, refused where it has to be, and
// alone with the state.
struct Call {
  Call(const char* symbol, Needs needs);

  std::unique_lock<std::mutex> lock;
  cu::Result refusal;
};

#define FAKE_CALL(needs)                         \
  fake::Call call(__func__, fake::Needs::needs); \
  if (call.refusal != cu::kSuccess) return call.refusal

// Waits for what is queued on the device now, not for what others add meanwhile.
cu::Result synchronize_device(std::unique_lock<std::mutex>& lock, cu::Device device);
// What the last release of a device's context does to its streams and events.
void abandon_objects(cu::Device device);

}  // namespace fake
