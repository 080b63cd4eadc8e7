#include "runtime/train.h"

#include <c10/util/Exception.h>

#include <cmath>
#include <ctime>
#include <optional>
#include <variant>

namespace waterflow {
namespace {

// Of the others' time. A job that owes more gives its lane to somebody else meanwhile.
constexpr double kLongRest = 2e-3;

bool is_held(Throttle* throttle) {
  return throttle != nullptr && !throttle->may_begin() && throttle->due() > kLongRest;
}

double thread_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

std::optional<TrainEnd> reason_to_end(const Train& train, const TrainResult& made, double begun) {
  if (made.losses.size() == train.batches.size()) return TrainEnd::kArrived;
  if (made.losses.empty()) return std::nullopt;
  if (train.signal->calls() != train.seen) return TrainEnd::kCalled;
  if (train.beside->deviated.load(std::memory_order_relaxed)) return TrainEnd::kDeviated;
  if (train.finite_only && !std::isfinite(made.losses.back())) return TrainEnd::kNotFinite;
  if (steady_seconds() - begun > train.seconds) return TrainEnd::kLate;
  return std::nullopt;
}

// Tells of a step that was made: one of its tape, or with Python's work before it.
void tell(const FlowStep& step, const Train& train, const TrainResult& made) {
  if (!step.throttle || !step.throttle->is_first()) return;
  const auto tape = reinterpret_cast<std::intptr_t>(step.job.tape.get());
  step.throttle->step_done(tape + (made.losses.size() == 1 ? train.first_kind : 0));
}

// Puts the tape and its plan at the start of a step.
void load(LanePool& pool, int lane, const FlowStep& step, const Train& train,
          const std::vector<at::Tensor>& batch) {
  step.job.tape->set_batch(batch);
  step.job.plan->begin(pool.arena(), step.job.id, train.beside, train.keeps_blocks, lane);
}

// Whether the step was made; else the train has failed.
bool run_next(LanePool& pool, int lane, const FlowStep& step, Gate& gate, const Train& train,
              TrainResult& made) {
  try {
    load(pool, lane, step, train, train.batches[made.losses.size()]);
  } catch (...) {  // its places are not free
    made.error = std::current_exception();
    return false;
  }
  RoundResult result = pool.run_step(lane, step, gate, nullptr);
  made.error = result.errors.front();
  if (made.error) return false;
  const double* loss = std::get_if<double>(&result.losses.front());
  TORCH_INTERNAL_ASSERT(loss != nullptr, "a train on a device that queues its steps");
  made.losses.push_back(*loss);
  made.metrics.push_back(std::move(result.metrics.front()));
  made.spans.insert(made.spans.end(), result.spans.begin(), result.spans.end());
  tell(step, train, made);
  return true;
}

}  // namespace

TrainResult run_train(LanePool& pool, int lane, const FlowStep& step, Gate& gate,
                      const Train& train, bool looked) {
  TrainResult made;
  const double begun = steady_seconds(), worked = thread_seconds();
  while (true) {
    if (const auto reason = reason_to_end(train, made, begun)) {
      made.end = *reason;
    } else if (!made.losses.empty() && is_held(step.throttle.get())) {
      made.end = TrainEnd::kHeld;
    } else if (!(looked && made.losses.empty()) &&
               !train.holds(made.losses.size(), *step.job.tape)) {
      made.end = TrainEnd::kChanged;
    } else if (!run_next(pool, lane, step, gate, train, made)) {
      made.end = TrainEnd::kFailed;
    } else {
      continue;
    }
    made.worked = thread_seconds() - worked;
    return made;
  }
}

}  // namespace waterflow
