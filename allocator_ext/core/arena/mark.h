// A moment in a lane's work, by which others can wait for what came before it.
#pragma once

#include <memory>

namespace waterflow {

double steady_seconds();  // of the steady clock

// What work can wait for on a device. Only the device knows what it is.
class DeviceEvent {
 public:
  virtual ~DeviceEvent() = default;
};

// On the host a time. On a device an event, which has a time only when the work before it is done.
struct Mark {
  double seconds = 0;
  std::shared_ptr<DeviceEvent> event;
};

}  // namespace waterflow
