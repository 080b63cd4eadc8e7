// Runs steps on lanes, in one of two ways.
//
// A round of a schedule: every lane executes its column of node groups; a counter barrier lets pair
// k+1 start when all groups of pair k are done, or queued on a device; the sync between them hands
// what pair k freed to everybody (Waterwave, section 4.3).
//
// Or one step by itself, on the lane that asks, beside whatever the other lanes do: a gate admits
// its groups (policy `flow`).
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <variant>
#include <vector>

#include "core/device/lane_device.h"
#include "core/device/staging.h"
#include "core/plan/gate.h"
#include "core/plan/throttle.h"
#include "runtime/lane.h"
#include "runtime/tape.h"

namespace waterflow {

struct Task {  // one node group of one job
  int lane = 0;
  int job = 0;  // index into the round's jobs
  int group = 0;
  int start = 0, stop = 0;  // instructions
};

struct RoundJob {
  std::shared_ptr<Tape> tape;
  std::shared_ptr<MemoryPlan> plan;
  JobId id = 0;
  std::shared_ptr<DeviceInput>
      device_input;  // of a job on a device, which its batch is copied to beforehand
};

struct Span {
  int lane, job, group;
  Mark start, stop;
};

// Why a step has failed; groups of it that come later see that it has.
struct Failure {
  std::exception_ptr error;
  std::atomic<bool> happened{false};  // set last, so that who sees it may look

  void note() {
    error = std::current_exception();
    happened.store(true);
  }
};

struct Round {
  std::vector<RoundJob> jobs;
  std::vector<std::vector<Task>> pairs;
};

// A step to run by itself: its groups' instructions, one after another, and how far each reaches.
struct FlowStep {
  RoundJob job;
  std::vector<std::pair<int, int>> groups;
  std::shared_ptr<const Demand> demand;
  std::vector<double> seconds;  // that each group takes, as profiled
  std::shared_ptr<Throttle> throttle = nullptr;
};

// A round, or a step, that has run, or that a device still runs.
struct RoundResult {
  std::vector<std::exception_ptr> errors;  // per job, null when all of its step was queued
  std::vector<std::variant<double, at::Tensor>> losses;  // per job, to be read after the end
  std::vector<Span> spans;
  Mark end;
  std::shared_ptr<LaneDevice> device;        // which knows the times of the marks
  std::vector<std::vector<double>> metrics;  // per job, what of them is not in the losses' tensors
};

// A counter that only grows; a wait is for a value, so a late waiter never misses its turn.
class CounterBarrier {
 public:
  void reset() { count_.store(0); }
  void arrive();
  void wait_until(int count);

 private:
  std::atomic<int> count_{0};
  std::mutex mutex_;  // the count grows under it, so that whoever goes to sleep misses nothing
  std::condition_variable changed_;
};

// What a lane has queued on a device of a step that others go before. While one of them works, only
// the last two pieces may still be queued or under way: so a rest of the lane is the device's, too,
// and what goes before waits for no more than these.
class Backlog {
 public:
  // How many instructions are queued at once.
  static constexpr int kPiece = 16;

  Backlog(LaneDevice& device, const Throttle& throttle) : device_(device), throttle_(throttle) {}
  // A piece was queued up to here.
  void add(Mark mark);

 private:
  static constexpr std::size_t kPieces = 2;

  LaneDevice& device_;
  const Throttle& throttle_;
  std::deque<Mark> pieces_;
};

class LanePool {
 public:
  LanePool(std::shared_ptr<Arena> arena, int lanes, std::shared_ptr<LaneDevice> device);

  LaneDevice& device() { return *device_; }
  Arena& arena() const { return *arena_; }
  // Serves rounds on the calling thread, which becomes lane `lane` (1, 2, ...), until shutdown.
  void serve(int lane);
  // Runs a round with the calling thread as lane 0; returns when every lane has executed or queued
  // all of it. Throws what keeps the lanes from waiting for each other: then the device is lost.
  RoundResult run(const Round& round);
  // Calls `work` with the number of each lane, on its thread; with 0 on the calling one. Returns
  // when all have. It must not throw.
  void run_on_all(const std::function<void(int)>& work);
  // Runs one step on the calling lane, within run_on_all, after the job's `former` one, which may
  // have been another lane's; null where that is known to be done. Throws as run does.
  RoundResult run_step(int lane, const FlowStep& step, Gate& gate, const RoundResult* former);
  void shutdown();

 private:
  void run_lane(int lane);
  void set_usual(int lane);
  void run_task(const Task& task);
  void execute(const RoundJob& job, const Task& task, Failure& failure, std::vector<Span>& spans,
               const std::function<void()>* pause = nullptr, Backlog* backlog = nullptr);
  void run_tape(const RoundJob& job, const Task& task, Failure& failure,
                const std::function<void()>* pause, const CopyOrder* order = nullptr);
  void run_moving(const RoundJob& job, const Task& task, Failure& failure, Backlog* backlog);
  void run_pieces(const RoundJob& job, Task task, Failure& failure, Backlog* backlog);
  void move(const RoundJob& job, Task task, Failure& failure);
  void abandon(const RoundJob& job, Lane lane);
  void run_admitted(int lane, const FlowStep& step, Gate& gate, const RoundResult* former,
                    Failure& failure, std::vector<Span>& spans);
  void wait_for_former(int lane, const RoundResult* former);
  void run_groups(int lane, const FlowStep& step, Gate& gate, Failure& failure,
                  std::vector<Span>& spans, const std::function<void()>& pause);
  void finish_pair();
  void drain();
  void note_failure();
  void rethrow_failure();

  const std::shared_ptr<Arena> arena_;
  const int lanes_;
  const std::shared_ptr<LaneDevice> device_;
  // The calling thread writes these before it calls the lanes and reads them when all are done. In
  // between a lane writes its own spans, and the failure of a job whose group it runs.
  const std::function<void(int)>* work_ = nullptr;
  const Round* round_ = nullptr;
  std::vector<std::atomic<int>> remaining_;  // groups of each pair not yet done
  std::vector<Failure> failures_;            // per job of the round
  std::vector<std::vector<Span>> spans_;     // per lane
  std::atomic<bool> broken_{false};
  CounterBarrier pairs_done_, lanes_done_;
  // Guards the failure. The atomics that follow change under it, too, so that a lane that goes to
  // sleep misses nothing.
  std::mutex mutex_;
  std::exception_ptr failure_;  // of all lanes' work as a whole
  std::condition_variable wake_;
  std::atomic<std::uint64_t> generation_{0};
  std::atomic<bool> stop_{false};
};

}  // namespace waterflow
