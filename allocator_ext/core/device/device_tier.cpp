#include "core/device/device_tier.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/arena/types.h"

namespace waterflow {
namespace {

// Two for each tier of the process, so that the copiers of no two tiers are one.
int new_copiers() {
  static std::atomic<int> tiers{0};
  return kFirstCopier + 2 * tiers.fetch_add(1);
}

}  // namespace

DeviceCopy::DeviceCopy(std::shared_ptr<const CudaDevice> device)
    : done_(std::move(device), /*timed=*/false) {}

void DeviceCopy::set(const CopyOf& what) {
  std::lock_guard lock(mutex_);
  what_ = what;
}

CopyOf DeviceCopy::take() {
  std::lock_guard lock(mutex_);
  return std::exchange(what_, {nullptr, nullptr, 0});
}

// As a host function; one that was cancelled has nothing to copy.
void DeviceCopy::run() {
  CopyOf what;
  {
    std::lock_guard lock(mutex_);
    what = std::exchange(what_, {nullptr, nullptr, 0});
    running_ = true;
  }
  if (what.target != nullptr) std::memcpy(what.target, what.source, what.bytes);
  {
    std::lock_guard lock(mutex_);
    running_ = false;
  }
  ended_.notify_all();
}

void DeviceCopy::cancel() {
  std::unique_lock lock(mutex_);
  what_ = {nullptr, nullptr, 0};
  ended_.wait(lock, [this] { return !running_; });
}

DeviceTier::DeviceTier(std::shared_ptr<const CudaDevice> device, std::size_t bytes,
                       bool host_functions)
    : device_(std::move(device)),
      host_functions_(host_functions),
      first_copier_(new_copiers()),
      memory_(std::make_unique<PinnedBuffer>(device_, std::max<std::size_t>(bytes, 1))) {
  for (Road& road : roads_) {
    road.stream = std::make_unique<CudaStream>(device_);
    road.reached = std::make_unique<CudaEvent>(device_, /*timed=*/false);
  }
}

DeviceTier::~DeviceTier() {
  for (const Road& road : roads_) {
    try {
      road.stream->wait();          // what it copies goes to this memory or comes from it
    } catch (const DriverError&) {  // then nothing is copied any more
    }
  }
}

bool DeviceTier::queue(cu::Stream lane, const std::shared_ptr<DeviceCopy>& copy, Way way) {
  const Road& road = roads_[static_cast<int>(way)];
  const cu::Stream stream = road.stream->get();
  {
    // A wait is for the record made last before it.
    std::lock_guard lock(mutex_);
    road.reached->record(lane);
    road.reached->make_wait(stream);
  }
  if (host_functions_) {
    launch_on(*device_, stream, [copy] { copy->run(); });
  } else if (const CopyOf what = copy->take(); what.target != nullptr) {
    ContextScope scope(*device_);
    WATERFLOW_CUDA(device_->driver(), cuMemcpyAsync, "to spill a tensor, or to bring one back",
                   reinterpret_cast<cu::DevicePointer>(what.target),
                   reinterpret_cast<cu::DevicePointer>(what.source), what.bytes, stream);
  }
  copy->done_.record(stream);
  return true;
}

bool DeviceTier::make_wait(cu::Stream lane, const DeviceCopy& copy) const {
  copy.done_.make_wait(lane);
  return true;
}

void DeviceTier::settle(DeviceCopy& copy) const {
  if (host_functions_) {
    copy.cancel();  // a host function may not wait for an event
    return;
  }
  try {
    copy.done_.wait();
  } catch (const DriverError&) {  // the device is lost: nothing is copied any more
  }
}

}  // namespace waterflow
