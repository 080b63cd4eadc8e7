#include "core/device/lane_device.h"

#include <utility>

namespace waterflow {
namespace {

// Its marks and waits know no other kind.
const CudaEvent& cuda(const DeviceEvent& event) { return static_cast<const CudaEvent&>(event); }

}  // namespace

CudaLaneDevice::CudaLaneDevice(std::shared_ptr<LaneStreams> streams, BindStream bind,
                               bool host_functions)
    : streams_(std::move(streams)), bind_(bind), host_functions_(host_functions) {
  origin_ = mark(0);
  wait(origin_);
  origin_.seconds = steady_seconds();
}

void CudaLaneDevice::bind(Lane lane) {
  if (bind_ != nullptr) bind_(streams_->device()->index(), streams_->stream(lane));
}

void CudaLaneDevice::set_first(Lane lane, bool first) {
  if (streams_->set_first(lane, first)) bind(lane);
}

void CudaLaneDevice::execute(Lane lane, const std::function<void()>& work) {
  if (host_functions_) {
    streams_->launch(lane, work);
  } else {
    work();
  }
}

void CudaLaneDevice::drain() {
  if (host_functions_) streams_->drain();
}

Mark CudaLaneDevice::mark(Lane lane) {
  std::shared_ptr<CudaEvent> event;
  {
    std::lock_guard lock(mutex_);
    // An event whose only owner is the list belongs to a mark that nobody can ask any more.
    for (std::size_t tried = 0; tried < events_.size() && !event; ++tried) {
      next_event_ = (next_event_ + 1) % events_.size();
      if (events_[next_event_].use_count() == 1) event = events_[next_event_];
    }
    if (!event) {
      event = std::make_shared<CudaEvent>(streams_->device(), /*timed=*/true);
      events_.push_back(event);
    }
  }
  event->record(streams_->stream(lane));
  return {0, std::move(event)};
}

double CudaLaneDevice::seconds(const Mark& mark) {
  std::lock_guard lock(mutex_);
  const double seconds = origin_.seconds + cuda(*mark.event).seconds_since(cuda(*origin_.event));
  // A device counts in single precision: near origins keep the times fine.
  constexpr double kFar = 60;
  if (seconds - origin_.seconds > kFar) origin_ = {seconds, mark.event};
  return seconds;
}

void CudaLaneDevice::wait(const Mark& mark) { cuda(*mark.event).wait(); }

void CudaLaneDevice::wait_event(Lane lane, const DeviceEvent& event) {
  cuda(event).make_wait(streams_->stream(lane));
}

void CudaLaneDevice::record(Lane lane, CudaEvent& event) { event.record(streams_->stream(lane)); }

}  // namespace waterflow
