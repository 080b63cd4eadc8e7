#include "core/device/cuda_device.h"

#include <algorithm>
#include <exception>
#include <utility>

namespace waterflow {
namespace {

// Lasting streams that nobody has at present. What is still queued on one comes before whatever its
// next owner queues.
class IdleStreams {
 public:
  static IdleStreams& of_process() {
    static auto* streams = new IdleStreams();  // never destroyed: PyTorch may ask until the end
    return *streams;
  }

  void add(std::shared_ptr<const CudaDevice> device, int priority, cu::Stream stream) {
    std::lock_guard lock(mutex_);
    idle_.push_back({std::move(device), priority, stream});
  }

  // One of this device's context and this priority, or null.
  cu::Stream take(const CudaDevice& device, int priority) {
    auto fits = [&](const Idle& idle) {
      return idle.device->context() == device.context() && idle.priority == priority;
    };
    std::lock_guard lock(mutex_);
    const auto found = std::find_if(idle_.begin(), idle_.end(), fits);
    if (found == idle_.end()) return nullptr;
    const cu::Stream stream = found->stream;
    idle_.erase(found);
    return stream;
  }

 private:
  struct Idle {
    std::shared_ptr<const CudaDevice> device;  // keeps the context, and so the stream
    int priority;
    cu::Stream stream;
  };
  std::mutex mutex_;
  std::vector<Idle> idle_;
};

}  // namespace

CudaDevice::CudaDevice(std::shared_ptr<const Driver> driver, int index)
    : driver_(std::move(driver)), index_(index) {
  find(index);
  check_features();
  WATERFLOW_CUDA(*driver_, cuDevicePrimaryCtxRetain, "to open the device", &context_, handle_);
}

CudaDevice::~CudaDevice() { driver_->cuDevicePrimaryCtxRelease_v2(handle_); }

void CudaDevice::find(int index) {
  const int count = driver_->device_count();
  if (index < 0 || index >= count) {
    throw BackendError("there is no CUDA device " + std::to_string(index) + ": this machine has " +
                       std::to_string(count) + (count == 0 ? "" : ", counted from 0"));
  }
  WATERFLOW_CUDA(*driver_, cuDeviceGet, "to find the device", &handle_, index);
  char name[256] = "";
  WATERFLOW_CUDA(*driver_, cuDeviceGetName, "to name the device", name, sizeof name, handle_);
  name_ = name;
}

void CudaDevice::check_features() const {
  int supported = 0;
  WATERFLOW_CUDA(*driver_, cuDeviceGetAttribute, "to ask for virtual memory management", &supported,
                 cu::kAttributeVirtualMemory, handle_);
  if (!supported) {
    throw BackendError("CUDA device " + std::to_string(index_) + " (" + name_ +
                       ") has no virtual memory management, which the arena needs");
  }
}

CudaDevice::Memory CudaDevice::memory() const {
  ContextScope scope(*this);
  Memory memory{};
  WATERFLOW_CUDA(*driver_, cuMemGetInfo_v2, "to ask for free memory", &memory.free, &memory.total);
  return memory;
}

void CudaDevice::synchronize() const {
  ContextScope scope(*this);
  WATERFLOW_CUDA(*driver_, cuCtxSynchronize, "to wait for the device");
}

std::string CudaDevice::failure() const {
  try {
    synchronize();
  } catch (const DriverError& error) {
    return error.what();
  }
  return "";
}

void CudaDevice::count_pinned(std::ptrdiff_t bytes) const {
  const auto delta = static_cast<std::size_t>(bytes);  // wraps around for a free, as it should
  const std::size_t now = pinned_.fetch_add(delta) + delta;
  if (bytes < 0) return;
  std::size_t most = most_pinned_.load();
  while (now > most && !most_pinned_.compare_exchange_weak(most, now)) {
  }
}

CudaDevice::Priorities CudaDevice::priorities() const {
  ContextScope scope(*this);
  Priorities range{};
  WATERFLOW_CUDA(*driver_, cuCtxGetStreamPriorityRange, "to ask for the priorities of streams",
                 &range.least, &range.greatest);
  return range;
}

CudaEvent::CudaEvent(std::shared_ptr<const CudaDevice> device, bool timed)
    : device_(std::move(device)) {
  ContextScope scope(*device_);
  WATERFLOW_CUDA(device_->driver(), cuEventCreate, "to make an event", &event_,
                 timed ? cu::kEventDefault : cu::kEventDisableTiming);
}

CudaEvent::~CudaEvent() {
  in_context(*device_, [this] { device_->driver().cuEventDestroy_v2(event_); });
}

void CudaEvent::record(cu::Stream stream) {
  ContextScope scope(*device_);
  WATERFLOW_CUDA(device_->driver(), cuEventRecord, "to record an event", event_, stream);
}

void CudaEvent::make_wait(cu::Stream stream) const {
  ContextScope scope(*device_);
  WATERFLOW_CUDA(device_->driver(), cuStreamWaitEvent, "to make a stream wait", stream, event_, 0);
}

void CudaEvent::wait() const {
  ContextScope scope(*device_);
  WATERFLOW_CUDA(device_->driver(), cuEventSynchronize, "to wait for an event", event_);
}

double CudaEvent::seconds_since(const CudaEvent& earlier) const {
  ContextScope scope(*device_);
  float milliseconds = 0;
  WATERFLOW_CUDA(device_->driver(), cuEventElapsedTime, "to measure a time", &milliseconds,
                 earlier.event_, event_);
  return milliseconds * 1e-3;
}

CudaStream::CudaStream(std::shared_ptr<const CudaDevice> device) : device_(std::move(device)) {
  ContextScope scope(*device_);
  WATERFLOW_CUDA(device_->driver(), cuStreamCreate, "to make a stream", &stream_,
                 cu::kStreamNonBlocking);
}

CudaStream::CudaStream(std::shared_ptr<const CudaDevice> device, int priority, bool lasting)
    : device_(std::move(device)), priority_(priority), lasting_(lasting) {
  if (lasting_) stream_ = IdleStreams::of_process().take(*device_, priority_);
  if (stream_ != nullptr) return;
  ContextScope scope(*device_);
  WATERFLOW_CUDA(device_->driver(), cuStreamCreateWithPriority, "to make a stream", &stream_,
                 cu::kStreamNonBlocking, priority);
}

CudaStream::~CudaStream() {
  if (lasting_) {
    IdleStreams::of_process().add(device_, priority_, stream_);
    return;
  }
  in_context(*device_, [this] { device_->driver().cuStreamDestroy_v2(stream_); });
}

void CudaStream::wait() const {
  ContextScope scope(*device_);
  WATERFLOW_CUDA(device_->driver(), cuStreamSynchronize, "to wait for a stream", stream_);
}

LaneStreams::LaneStreams(std::shared_ptr<const CudaDevice> device, int lanes, bool lasting)
    : device_(std::move(device)) {
  const auto [least, greatest] = device_->priorities();
  has_priorities_ = greatest < least;
  for (int lane = 0; lane < lanes; ++lane) {
    auto one = std::make_unique<OneLane>();
    one->usual = std::make_unique<CudaStream>(device_, least, lasting);
    if (has_priorities_) one->urgent = std::make_unique<CudaStream>(device_, greatest, lasting);
    one->reached = std::make_unique<CudaEvent>(device_, /*timed=*/false);
    one->switched = std::make_unique<CudaEvent>(device_, /*timed=*/false);
    lanes_.push_back(std::move(one));
  }
}

bool LaneStreams::set_first(Lane lane, bool first) {
  OneLane& one = *lanes_.at(lane);
  if (!has_priorities_ || one.first.load() == first) return false;
  std::lock_guard lock(mutex_);
  one.switched->record(one.present()->get());
  one.switched->make_wait((first ? one.urgent : one.usual)->get());
  one.first.store(first);
  return true;
}

void LaneStreams::join() {
  if (lanes() == 1) return;  // a stream is in order by itself
  // A wait is for the record made last before it, so two joins at once would mix their events.
  std::lock_guard lock(mutex_);
  for (int lane = 0; lane < lanes(); ++lane) lanes_[lane]->reached->record(stream(lane));
  for (int lane = 0; lane < lanes(); ++lane) {
    for (int other = 0; other < lanes(); ++other) {
      if (other != lane) lanes_[other]->reached->make_wait(stream(lane));
    }
  }
}

// What is queued uses memory that the caller is about to let go of: a wait that fails is tried once
// more. If it fails again the device is lost, and nothing that was queued will run.
void LaneStreams::drain() const {
  std::exception_ptr failure;
  for (const auto& lane : lanes_) {
    for (int attempt = 0; attempt < 2; ++attempt) {
      try {
        lane->present()->wait();  // the lane's other stream was joined when it was left
        break;
      } catch (...) {
        if (!failure) failure = std::current_exception();
      }
    }
  }
  if (failure) std::rethrow_exception(failure);
}

void LaneStreams::launch(Lane lane, std::function<void()> work) {
  launch_on(*device_, stream(lane), std::move(work));
}

void launch_on(const CudaDevice& device, cu::Stream stream, std::function<void()> work) {
  auto call = [](void* queued) {
    std::unique_ptr<std::function<void()>> owned(static_cast<std::function<void()>*>(queued));
    (*owned)();
  };
  auto queued = std::make_unique<std::function<void()>>(std::move(work));
  ContextScope scope(device);
  WATERFLOW_CUDA(device.driver(), cuLaunchHostFunc, "to queue host work", stream, call,
                 queued.get());
  queued.release();
}

}  // namespace waterflow
