// How much slower a job that goes first is beside others than alone, from turns that follow each
// other closely.
//
// On a shared machine what a step takes wanders over tenths of seconds and minutes, by far more
// than the harm that is to be seen; from one step to the next it hardly does. So the others are
// held for a moment and let go for a moment, again and again, and each turn beside them is compared
// with the turns alone just before and just after it: what makes the machine steadily slower or
// faster cancels out. Steps are timed one by one, where they are made: turns of whole trains had
// errors several times as large.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <unordered_map>
#include <vector>

namespace waterflow {

class Precedence;

// By how much a job was slower than alone, 0.01 is 1 %, and the standard error of that.
struct Harm {
  double slowdown;
  double error;
};

// Of one job and those beside it, from its beginning until the harm is told. Thread-safe; of the
// job itself one thread at a time tells what it does.
class Alternation {
 public:
  // `precedence`: holds the others. `tolerance`: the slowdown that is no harm; positive. After
  // turns of `most_seconds` all is said that can be.
  Alternation(std::shared_ptr<Precedence> precedence, double tolerance, double most_seconds);

  // The job has a lane from now on.
  void begin();
  // It has made a step; only equal kinds are compared.
  void step_done(std::int64_t kind);
  // It gives its lane back, after so many steps: those that have not been told of singly were of
  // this kind.
  void leave(std::int64_t kind, int steps);
  // It has made some steps in so many seconds. `disturbed`: others still worked at their beginning
  // who cannot be held at once.
  void note(std::int64_t kind, double seconds, int steps, bool disturbed = false);
  // There is no more to tell: nobody is held any longer.
  void stop();

  // Whether the others are to be held now.
  bool holds() const;
  // Nothing as long as more turns would tell more.
  std::optional<Harm> harm() const;

 private:
  struct Taken {
    double seconds = 0;
    int steps = 0;
  };

  // All with the lock held.
  void add(std::int64_t kind, double seconds, int steps, bool disturbed);
  void end_turn();
  void compare(const std::unordered_map<std::int64_t, double>& after);
  void estimate();
  void hold(bool holds);
  int settling();

  const std::shared_ptr<Precedence> precedence_;
  const double tolerance_;
  const double most_seconds_;
  mutable std::mutex mutex_;  // guards all that follows
  std::minstd_rand chance_;
  double since_ = 0;                                // when the job had a lane, or made a step
  int told_ = 0;                                    // steps told of singly since it has the lane
  bool disturbed_ = false;                          // at the last look
  std::unordered_map<std::int64_t, double> alone_;  // seconds a step, when last made alone
  std::unordered_map<std::int64_t, Taken> turn_;
  double turn_seconds_ = 0;
  std::unordered_map<std::int64_t, Taken> beside_;  // the last turn beside the others
  int settling_;
  std::vector<double> ratios_;  // their logarithms, one for each turn beside the others
  double mean_ = 0;             // of these
  double error_;
  double seconds_ = 0;
  bool holds_ = false;
  bool stopped_ = false;
};

}  // namespace waterflow
