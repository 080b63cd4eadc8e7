// Runs one round of a schedule: every lane executes its column of node groups; a counter barrier
// lets pair k+1 start when all groups of pair k are done; the sync between them hands what pair k
// freed to everybody (Waterwave, section 4.3).
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <vector>

#include "lane.h"
#include "tape.h"

namespace waterflow {

struct Task {  // one node group of one job
  int lane = 0;
  int job = 0;  // index into the round's jobs
  int group = 0;
  int start = 0, stop = 0;  // instructions
};

struct RoundJob {
  std::shared_ptr<Tape> tape;
  std::shared_ptr<Script> script;
  JobId id = 0;
};

struct Span {
  int lane, job, group;
  double start, stop;  // seconds of the steady clock
};

struct Round {
  std::vector<RoundJob> jobs;
  std::vector<std::vector<Task>> pairs;
};

struct RoundResult {
  std::vector<std::exception_ptr> errors;  // per job, null when its step is complete
  std::vector<Span> spans;
};

// A counter that only grows; a wait is for a value, so a late waiter never misses its turn.
class CounterBarrier {
 public:
  void reset() { count_.store(0); }
  void arrive();
  void wait_until(int count);

 private:
  std::atomic<int> count_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
};

class LanePool {
 public:
  LanePool(std::shared_ptr<Arena> arena, int lanes);

  // Serves rounds on the calling thread, which becomes lane `lane` (1, 2, ...), until shutdown.
  void serve(int lane);
  // Runs a round with the calling thread as lane 0; returns when every lane is done.
  RoundResult run(const Round& round);
  void shutdown();

 private:
  void run_lane(int lane);
  void run_task(const Task& task);

  std::shared_ptr<Arena> arena_;
  int lanes_;
  const Round* round_ = nullptr;
  std::vector<std::atomic<int>> remaining_;  // groups of each pair not yet done
  std::vector<std::exception_ptr> errors_;
  std::vector<std::vector<Span>> spans_;  // per lane
  CounterBarrier pairs_done_, lanes_done_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<std::uint64_t> generation_{0};
  std::atomic<bool> stop_{false};
};

}  // namespace waterflow
