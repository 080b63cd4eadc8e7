// Holds jobs back for the sake of others that go first: AntMan's GpuOpManager (section 4), which
// puts idle time before the operators of a job.
//
// A throttled job has a duty: the share of time that it may work while one of those others does. It
// owes a rest for whatever it has worked in their time, and pays before its next operators. Time in
// which none of the others works costs nothing, so a job whose duty is 0 has all of that.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

#include "core/plan/alternation.h"
#include "core/plan/signal.h"

namespace waterflow {

// The time of jobs that go first: a clock that runs while one of them works. Thread-safe.
class Precedence {
 public:
  // One of them begins, or has ended, its work. Throws std::logic_error where none has begun.
  void enter();
  void leave();
  bool is_busy() const { return working_.load(std::memory_order_acquire) > 0; }
  double seconds() const;  // that at least one has worked so far

  // All others are to stand still for a moment while one of them works, or no longer.
  void hold(bool holds);
  bool holds() const { return holds_.load(std::memory_order_acquire); }

  // So many of the others do what cannot be held at once.
  void disturb(int jobs) { disturbing_.store(jobs, std::memory_order_relaxed); }
  bool is_disturbed() const { return disturbing_.load(std::memory_order_relaxed) > 0; }

  // Waits until others may work that could not, at most so many seconds.
  void wait(double seconds);

 private:
  mutable std::mutex mutex_;         // guards all that follows; atomics are read without it, too
  std::condition_variable changed_;  // none works, or others are held, any more
  std::atomic<int> working_{0};
  std::atomic<bool> holds_{false};
  std::atomic<int> disturbing_{0};
  double since_ = 0;
  double seconds_ = 0;
};

// One job's. `begin`, `pause` and `end` are called by whoever works for the job, one at a time; the
// rest by anybody.
class Throttle {
 public:
  // `signal`: whoever calls ends a rest in the middle of a step, which is owed all the same.
  Throttle(std::shared_ptr<Precedence> precedence, std::shared_ptr<const Signal> signal);

  // The share of the others' time in which the job may work, from 0 to 1. Throws
  // std::invalid_argument where it is none.
  void set_duty(double duty);
  double duty() const;

  void begin();
  // In the middle of work: rests as is due. `awaited`: whether somebody waits for what the job
  // holds; then it goes on.
  void pause(const std::function<bool()>& awaited);
  void end();
  // The same for work that is only queued, of so many seconds; then without begin and end.
  void owe(double seconds);

  // The job has made a step, which goes first and is compared with others of its kind.
  void step_done(std::int64_t kind);
  // That are told of the job's steps; none: null.
  void compare(std::shared_ptr<Alternation> comparison);

  // Whether no rest is due before the next step.
  bool may_begin();
  // Seconds of the others' work that the job owes; infinite where its duty is 0.
  double due();
  // How long the job has rested in the middle of steps.
  double rested_seconds() const;

  // Whether the job goes before the others. Any thread.
  void set_first(bool first) { first_.store(first, std::memory_order_relaxed); }
  bool is_first() const { return first_.load(std::memory_order_relaxed); }
  // Whether others go before the job, and work: then little of its work is to be queued.
  bool is_behind() const { return !is_first() && precedence_->is_busy(); }

 private:
  double settle();       // brings the debt up to date and returns what is due
  bool is_held() const;  // with all others, for a moment

  const std::shared_ptr<Precedence> precedence_;
  const std::shared_ptr<const Signal> signal_;
  mutable std::mutex mutex_;  // guards all that follows
  double duty_ = 1;
  double debt_ = 0;     // seconds of the others' work
  double settled_ = 0;  // the others' clock when it was last brought up to date
  bool working_ = false;
  std::uint64_t seen_ = 0;  // calls when the work began
  double rested_ = 0;
  std::shared_ptr<Alternation> comparison_;
  std::atomic<bool> first_{false};
  std::atomic<bool> is_throttled_{false};  // whether the duty is less than 1
};

}  // namespace waterflow
