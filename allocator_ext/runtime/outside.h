#pragma once

#include "runtime/lane.h"

namespace waterflow {

// While alive, the calling thread is no lane: what is not the job's own memory must not come from
// the arena.
class OutsideLane {
 public:
  OutsideLane() : lane_(exchange_lane(nullptr)) {}
  ~OutsideLane() { exchange_lane(lane_); }
  OutsideLane(const OutsideLane&) = delete;
  OutsideLane& operator=(const OutsideLane&) = delete;

 private:
  LaneContext* lane_;
};

}  // namespace waterflow
