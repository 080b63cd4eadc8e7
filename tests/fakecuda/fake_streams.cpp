// Streams as threads, events as records in them, and copies.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <thread>

#include "fake_driver.h"

namespace fake {
namespace {

using Clock = std::chrono::steady_clock;

void complete(Record& record) {
  record.done = true;
  record.at = Clock::now();
}

// A record that is dropped counts as done, so that nobody waits for it after a reset.
void finish(StreamObject& stream, Work& work) {
  ++stream.finished;
  if (work.record != nullptr) complete(*work.record);
}

void drop_queue(StreamObject& stream) {
  for (Work& work : stream.queue) finish(stream, work);
  stream.queue.clear();
}

// Sleeps and works without the lock, and takes it again.
void execute(std::unique_lock<std::mutex>& lock, StreamObject& stream, Work work) {
  State& fake = state();
  const auto delay = fake.next_delay();
  lock.unlock();
  if (delay.count() > 0) std::this_thread::sleep_for(delay);
  lock.lock();
  if (work.epoch == fake.epoch) {
    lock.unlock();
    const cu::Result result = work.run();
    lock.lock();
    if (result != cu::kSuccess && work.epoch == fake.epoch) fake.break_context(result);
    if (work.epoch == fake.epoch) fake.count_item();
  }
  finish(stream, work);
  fake.changed.notify_all();
}

void work_off(const std::shared_ptr<StreamObject>& stream) {
  State& fake = state();
  std::unique_lock<std::mutex> lock(fake.mutex);
  while (true) {
    fake.changed.wait(lock, [&] { return stream->queue.empty() ? stream->closing : !fake.held; });
    if (stream->queue.empty()) break;
    Work work = std::move(stream->queue.front());
    stream->queue.pop_front();
    execute(lock, *stream, std::move(work));
  }
  fake.running.erase(std::find(fake.running.begin(), fake.running.end(), stream));
}

std::shared_ptr<StreamObject> open_stream(cu::Device device, int priority = 0) {
  auto stream = std::make_shared<StreamObject>();
  stream->device = device;
  stream->priority = priority;
  state().running.push_back(stream);
  std::thread(work_off, stream).detach();
  return stream;
}

void close_stream(StreamObject& stream) {
  stream.closing = true;
  state().changed.notify_all();
}

// Null for a handle that means nothing. The null handle is the current context's default stream.
std::shared_ptr<StreamObject> find_stream(cu::Stream handle) {
  if (handle == nullptr) {
    auto& stream = state().default_streams[current_device()];
    if (stream == nullptr) stream = open_stream(current_device());
    return stream;
  }
  auto stream = state().streams.find(handle);
  return stream == nullptr || stream->lost ? nullptr : stream;
}

std::shared_ptr<EventObject> find_event(cu::Event handle) {
  auto event = state().events.find(handle);
  return event == nullptr || event->lost ? nullptr : event;
}

void enqueue(StreamObject& stream, std::function<cu::Result()> run,
             std::shared_ptr<Record> record = nullptr) {
  stream.queue.push_back({std::move(run), std::move(record), state().epoch});
  ++stream.queued;
  ++state().items_by_priority[stream.priority];
  state().changed.notify_all();
}

struct Side {
  std::uintptr_t address;
  int protection;  // 0: host memory, which the driver cannot check

  bool accessible(std::size_t bytes) const {
    return protection == 0 || state().memory.accessible(address, bytes, protection);
  }
};

// A copy is not told which side is the host's: with unified addressing the address says so.
Side side_at(cu::DevicePointer pointer, int protection) {
  return {pointer, state().memory.reserved(pointer) ? protection : 0};
}

// Memory that was unmapped while its copy waited is a fault of the device, not of this call.
cu::Result copy_now(Side to, Side from, std::size_t bytes) {
  std::shared_lock<std::shared_mutex> lock(state().memory.in_use);
  if (!to.accessible(bytes) || !from.accessible(bytes)) return kIllegalAddress;
  std::memcpy(reinterpret_cast<void*>(to.address), reinterpret_cast<void*>(from.address), bytes);
  return cu::kSuccess;
}

cu::Result copy_later(Side to, Side from, std::size_t bytes, cu::Stream handle) {
  const auto stream = find_stream(handle);
  if (stream == nullptr) return kInvalidHandle;
  if (bytes == 0) return cu::kSuccess;
  if (!to.accessible(bytes) || !from.accessible(bytes)) return kInvalidValue;
  const bool overlap = to.address < from.address + bytes && from.address < to.address + bytes;
  if (overlap) return kInvalidValue;
  enqueue(*stream, [=] { return copy_now(to, from, bytes); });
  return cu::kSuccess;
}

cu::Result run_host_function(cu::HostFunction function, void* argument) {
  in_host_function() = true;
  function(argument);
  in_host_function() = false;
  return cu::kSuccess;
}

// Work that others add to the stream meanwhile is not waited for.
cu::Result synchronize(std::unique_lock<std::mutex>& lock, const StreamObject& stream) {
  const std::uint64_t until = stream.queued;
  return state().wait(lock, [&, until] { return stream.finished >= until; });
}

}  // namespace

void State::break_context(cu::Result code) {
  broken = last_break = code;
  items_until_break = 0;
  ++epoch;
  for (const auto& stream : running) drop_queue(*stream);
  changed.notify_all();
}

void State::count_item() {
  if (items_until_break > 0 && --items_until_break == 0) break_context(planned_break);
}

std::chrono::microseconds State::next_delay() {
  if (max_delay == 0) return std::chrono::microseconds(0);
  return std::chrono::microseconds(std::uniform_int_distribution<>(0, max_delay)(random));
}

cu::Result State::wait(std::unique_lock<std::mutex>& lock, const std::function<bool()>& reached) {
  const std::uint64_t before = epoch;
  changed.wait(lock, [&] { return epoch != before || reached(); });
  return epoch == before ? cu::kSuccess : last_break;
}

cu::Result synchronize_device(std::unique_lock<std::mutex>& lock, cu::Device device) {
  std::vector<std::pair<std::shared_ptr<StreamObject>, std::uint64_t>> pending;
  for (const auto& stream : state().running) {
    if (stream->device == device) pending.emplace_back(stream, stream->queued);
  }
  return state().wait(lock, [&] {
    return std::all_of(pending.begin(), pending.end(),
                       [](const auto& entry) { return entry.first->finished >= entry.second; });
  });
}

void abandon_objects(cu::Device device) {
  State& fake = state();
  for (const auto& [handle, event] : fake.events.all()) {
    if (event->device == device) event->lost = true;
  }
  for (const auto& stream : fake.running) {
    if (stream->device != device) continue;
    stream->lost = true;
    close_stream(*stream);
  }
  fake.default_streams[device] = nullptr;
}

}  // namespace fake

using namespace fake;

extern "C" {

cu::Result cuStreamCreate(cu::Stream* handle, unsigned flags) {
  FAKE_CALL(kContext);
  if (flags > cu::kStreamNonBlocking) return kInvalidValue;
  *handle = state().streams.add(open_stream(current_device()));
  return cu::kSuccess;
}

// A priority beyond the range is taken as the nearest one in it.
cu::Result cuStreamCreateWithPriority(cu::Stream* handle, unsigned flags, int priority) {
  FAKE_CALL(kContext);
  if (flags > cu::kStreamNonBlocking) return kInvalidValue;
  const State& fake = state();
  priority = std::min(fake.least_priority, std::max(fake.greatest_priority, priority));
  *handle = state().streams.add(open_stream(current_device(), priority));
  return cu::kSuccess;
}

cu::Result cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  FAKE_CALL(kContext);
  if (least != nullptr) *least = state().least_priority;
  if (greatest != nullptr) *greatest = state().greatest_priority;
  return cu::kSuccess;
}

cu::Result cuStreamDestroy_v2(cu::Stream handle) {
  FAKE_CALL(kContext);
  if (handle == nullptr || find_stream(handle) == nullptr) return kInvalidHandle;
  close_stream(*state().streams.take(handle));
  return cu::kSuccess;
}

cu::Result cuStreamSynchronize(cu::Stream handle) {
  FAKE_CALL(kContext);
  const auto stream = find_stream(handle);
  return stream == nullptr ? kInvalidHandle : synchronize(call.lock, *stream);
}

cu::Result cuStreamWaitEvent(cu::Stream handle, cu::Event event_handle, unsigned flags) {
  FAKE_CALL(kContext);
  const auto stream = find_stream(handle);
  const auto event = find_event(event_handle);
  if (stream == nullptr || event == nullptr) return kInvalidHandle;
  if (flags != 0) return kInvalidValue;
  if (event->latest == nullptr || state().ignores_waits) return cu::kSuccess;
  enqueue(*stream, [record = event->latest, epoch = state().epoch] {
    State& fake = state();
    std::unique_lock<std::mutex> lock(fake.mutex);
    fake.changed.wait(lock, [&] { return record->done || fake.epoch != epoch; });
    return cu::kSuccess;
  });
  return cu::kSuccess;
}

cu::Result cuEventCreate(cu::Event* handle, unsigned flags) {
  FAKE_CALL(kContext);
  constexpr unsigned kEveryFlag = 7;
  if (flags > kEveryFlag) return kInvalidValue;
  const bool timed = (flags & cu::kEventDisableTiming) == 0;
  *handle = state().events.add(
      std::make_shared<EventObject>(EventObject{current_device(), timed, nullptr}));
  return cu::kSuccess;
}

// Waits and records that are under way hold the record itself.
cu::Result cuEventDestroy_v2(cu::Event handle) {
  FAKE_CALL(kContext);
  if (find_event(handle) == nullptr) return kInvalidHandle;
  state().events.take(handle);
  return cu::kSuccess;
}

cu::Result cuEventRecord(cu::Event handle, cu::Stream stream_handle) {
  FAKE_CALL(kContext);
  const auto event = find_event(handle);
  const auto stream = find_stream(stream_handle);
  if (event == nullptr || stream == nullptr) return kInvalidHandle;
  if (event->device != stream->device) return kInvalidHandle;
  event->latest = std::make_shared<Record>();
  enqueue(*stream, [] { return cu::kSuccess; }, event->latest);
  return cu::kSuccess;
}

cu::Result cuEventQuery(cu::Event handle) {
  FAKE_CALL(kContext);
  const auto event = find_event(handle);
  if (event == nullptr) return kInvalidHandle;
  return event->latest == nullptr || event->latest->done ? cu::kSuccess : cu::kNotReady;
}

cu::Result cuEventSynchronize(cu::Event handle) {
  FAKE_CALL(kContext);
  const auto event = find_event(handle);
  if (event == nullptr) return kInvalidHandle;
  const auto record = event->latest;
  if (record == nullptr) return cu::kSuccess;
  return state().wait(call.lock, [&] { return record->done; });
}

cu::Result cuEventElapsedTime(float* milliseconds, cu::Event start_handle, cu::Event end_handle) {
  FAKE_CALL(kContext);
  const auto start = find_event(start_handle);
  const auto end = find_event(end_handle);
  if (start == nullptr || end == nullptr) return kInvalidHandle;
  if (start->device != end->device || !start->timed || !end->timed) return kInvalidHandle;
  if (start->latest == nullptr || end->latest == nullptr) return kInvalidHandle;
  if (!start->latest->done || !end->latest->done) return cu::kNotReady;
  const std::chrono::duration<float, std::milli> elapsed = end->latest->at - start->latest->at;
  *milliseconds = elapsed.count();
  return cu::kSuccess;
}

cu::Result cuLaunchHostFunc(cu::Stream handle, cu::HostFunction function, void* argument) {
  FAKE_CALL(kContext);
  const auto stream = find_stream(handle);
  if (stream == nullptr) return kInvalidHandle;
  if (function == nullptr) return kInvalidValue;
  enqueue(*stream, [=] { return run_host_function(function, argument); });
  return cu::kSuccess;
}

cu::Result cuMemcpyAsync(cu::DevicePointer to, cu::DevicePointer from, std::size_t bytes,
                         cu::Stream stream) {
  FAKE_CALL(kContext);
  return copy_later(side_at(to, PROT_WRITE), side_at(from, PROT_READ), bytes, stream);
}

cu::Result cuCtxSynchronize() {
  FAKE_CALL(kContext);
  return synchronize_device(call.lock, current_device());
}

}  // extern "C"
