// Who may go on, where lanes are not in lockstep (policy `flow`).
//
// Two lanes share a range of memory from its two ends: a step on the even lane piles its blocks up
// from the bottom, a step on the odd lane from the top (see pile.h). So all that a lane must know
// of the other is how far its pile reaches now, and what one lets go of is the other's at once.
//
// A node group may begin when its pile and the neighbour's fit the range together, and when the
// state after it is safe in the banker's sense (Dijkstra): some order exists in which both steps
// reach their ends. A state from which there is none is never entered, so lanes cannot block each
// other for good. Nor can one starve: whoever is kept waiting goes before the neighbour's next
// step.
//
// On a device groups are only queued here. What a group takes over may still be in use by groups
// that the neighbour queued before; enter() tells which mark of the neighbour's to wait for.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "core/arena/mark.h"
#include "core/arena/types.h"

namespace waterflow {

// How far the pile of a step reaches from its end of the range, in bytes.
struct Demand {
  std::vector<std::size_t> during;  // at most, while each group runs
  std::vector<std::size_t> after;   // between the groups: 0 before the first and after the last

  // Throws std::invalid_argument unless both are of one step, and what a group starts or ends with
  // is part of what it reaches.
  Demand(std::vector<std::size_t> during, std::vector<std::size_t> after);
  std::size_t groups() const { return during.size(); }
  std::size_t most() const;
};

// The states of two steps from which both can be finished: `done` counts the groups of each.
class SafeStates {
 public:
  SafeStates(const Demand& a, const Demand& b, std::size_t range);
  bool operator()(std::size_t done_a, std::size_t done_b) const {
    return safe_[done_a * (groups_b_ + 1) + done_b];
  }

 private:
  std::size_t groups_b_;
  std::vector<bool> safe_;
};

// The most that the piles of two steps reach at once in a range, in any order that a gate allows.
std::size_t most_together(const Demand& a, const Demand& b, std::size_t range);

// Each lane calls begin, then enter and leave for each group in turn, then end, which also ends a
// step that has failed halfway. Thread-safe.
class Gate {
 public:
  // `range` bytes for each two lanes: lanes 0 and 1 share the first, 2 and 3 the second.
  Gate(std::size_t range, int lanes);

  // Throws std::invalid_argument where the step does not fit the range even alone, std::logic_error
  // (like the calls below) where it is not this call's turn on the lane.
  void begin(Lane lane, std::shared_ptr<const Demand> demand);
  // Returns the mark that the lane's stream must wait for first, if there is one.
  std::optional<Mark> enter(Lane lane);
  void leave(Lane lane, const Mark& mark);
  void end(Lane lane);

  // The same without waiting, for simulations: false changes nothing but that the lane now waits.
  bool try_begin(Lane lane, std::shared_ptr<const Demand> demand);
  bool try_enter(Lane lane);

  // Whether the neighbour waits for this lane, for memory that it holds.
  bool is_awaited(Lane lane);

  // How often a group found its memory in the neighbour's hands and was kept waiting for it.
  std::size_t waits() const;
  // How long lanes have waited here, of all of them together.
  double waited_seconds() const;

 private:
  struct LaneState {
    std::shared_ptr<const Demand> demand;  // null between steps
    std::size_t done = 0;                  // groups
    bool running = false;
    bool waiting = false;
    // What the neighbour may have to wait for on a device: groups queued so far that no later one
    // reaches as far as; the reach falls from front to back.
    std::vector<std::pair<std::size_t, Mark>> pending_marks;
  };

  LaneState& state_of(Lane lane, bool running);
  LaneState* neighbour(Lane lane);
  const SafeStates& safe_states(const LaneState& a, const LaneState& b);
  void check(const Demand& demand) const;
  bool may_begin(Lane lane) { return !neighbour(lane) || !neighbour(lane)->waiting; }
  bool may_enter(Lane lane);
  void assign(Lane lane, std::shared_ptr<const Demand> demand);
  std::optional<Mark> take(Lane lane);
  template <typename Ready>
  void wait(std::unique_lock<std::mutex>& lock, Ready ready);

  const std::size_t range_;
  mutable std::mutex mutex_;         // guards all that follows
  std::condition_variable changed_;  // some lane has left, ended or stopped waiting
  std::vector<LaneState> states_;
  using Steps = std::pair<std::shared_ptr<const Demand>, std::shared_ptr<const Demand>>;
  std::map<Steps, SafeStates> safe_states_;  // the key keeps the steps alive
  std::size_t waits_ = 0;
  double waited_seconds_ = 0;
};

}  // namespace waterflow
