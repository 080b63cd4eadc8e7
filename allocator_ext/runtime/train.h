// A train: steps of one job that a lane runs one after another, without going back to Python
// between them. Each is what it would be by itself: the state of Python that it takes for granted
// is looked at before it, the gate admits it, and whatever calls for attention ends the train at
// once.
//
// For devices on which a step is done when its call returns; elsewhere a train would run ahead of
// the device without bound.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <vector>

#include "core/plan/gate.h"
#include "core/plan/memory_plan.h"
#include "core/plan/signal.h"
#include "runtime/lane_pool.h"

namespace waterflow {

// Why a train has ended.
enum class TrainEnd {
  kArrived,    // all its steps are made
  kCalled,     // somebody has called
  kLate,       // its time is over
  kChanged,    // Python state is not what its steps take for granted
  kDeviated,   // a request for memory was not as profiled
  kNotFinite,  // the loss of its last step is no number
  kFailed,     // its next step has failed
  kHeld,       // its job owes others a longer rest
};

// The first step is made in any case, if its look holds: whoever sets out has been chosen for it.
struct Train {
  std::vector<std::vector<at::Tensor>> batches;  // one a step
  // Does what comes behind so many steps, beside the step itself, gives the tape of the next one
  // its numbers, and says whether that is still the right one.
  std::function<bool(std::size_t made, Tape& next)> holds;
  std::shared_ptr<RoundMemory> beside;
  bool keeps_blocks = true;
  std::shared_ptr<const Signal> signal;
  std::uint64_t seen = 0;  // calls that are no reason to end
  double seconds = 0;      // later no step begins
  bool finite_only = false;
  int first_kind = 0;  // how its first step is unlike others, as Python's work comes before it
};

struct TrainResult {
  std::vector<double> losses;                // of the steps made
  std::vector<std::vector<double>> metrics;  // of the same steps
  std::vector<Span> spans;                   // of these, as many for each as it has groups
  std::exception_ptr error;                  // of the step after them, where it has failed
  TrainEnd end = TrainEnd::kArrived;
  std::size_t scheduled = 0;  // behind so many of the steps, all is done that is known ahead
  double worked = 0;  // seconds that the lane's thread has worked for the train, waits left out

  // Of the lane, that its steps took.
  double seconds() const {
    double sum = 0;
    for (const Span& span : spans) sum += span.stop.seconds - span.start.seconds;
    return sum;
  }
};

// Throws as LanePool::run_step does. `looked`: whether it is known that the first step may be made.
TrainResult run_train(LanePool& pool, int lane, const FlowStep& step, Gate& gate,
                      const Train& train, bool looked = false);

}  // namespace waterflow
