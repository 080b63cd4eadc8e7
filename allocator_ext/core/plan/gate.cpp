#include "core/plan/gate.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace waterflow {

Demand::Demand(std::vector<std::size_t> during_groups, std::vector<std::size_t> after_groups)
    : during(std::move(during_groups)), after(std::move(after_groups)) {
  if (during.empty() || after.size() != during.size() + 1) {
    throw std::invalid_argument("a step of " + std::to_string(during.size()) +
                                " groups needs one more border than groups, got " +
                                std::to_string(after.size()));
  }
  if (after.front() != 0 || after.back() != 0) {
    throw std::invalid_argument("a step must begin and end without blocks of its own");
  }
  for (std::size_t group = 0; group < during.size(); ++group) {
    if (std::max(after[group], after[group + 1]) > during[group]) {
      throw std::invalid_argument("group " + std::to_string(group) +
                                  " begins or ends with more than it ever holds");
    }
  }
}

std::size_t Demand::most() const { return *std::max_element(during.begin(), during.end()); }

SafeStates::SafeStates(const Demand& a, const Demand& b, std::size_t range)
    : groups_b_(b.groups()), safe_((a.groups() + 1) * (b.groups() + 1)) {
  for (std::size_t i = a.groups() + 1; i-- > 0;) {
    for (std::size_t j = b.groups() + 1; j-- > 0;) {
      bool safe = i == a.groups() || j == b.groups();  // the other can finish alone
      safe = safe || (a.during[i] + b.after[j] <= range && (*this)(i + 1, j));
      safe = safe || (b.during[j] + a.after[i] <= range && (*this)(i, j + 1));
      safe_[i * (groups_b_ + 1) + j] = safe;
    }
  }
}

std::size_t most_together(const Demand& a, const Demand& b, std::size_t range) {
  const SafeStates safe(a, b, range);
  std::size_t most = 0;
  auto note = [&](std::size_t both, std::size_t done_a, std::size_t done_b) {
    if (both <= range && both > most && safe(done_a, done_b)) most = both;
  };
  // With one of them between two groups, which is where a step begins and ends, and with neither.
  for (std::size_t i = 0; i <= a.groups(); ++i) {
    for (std::size_t j = 0; j <= b.groups(); ++j) {
      if (i < a.groups()) note(a.during[i] + b.after[j], i + 1, j);
      if (j < b.groups()) note(a.after[i] + b.during[j], i, j + 1);
      if (i < a.groups() && j < b.groups()) note(a.during[i] + b.during[j], i + 1, j + 1);
    }
  }
  return most;
}

Gate::Gate(std::size_t range, int lanes) : range_(range), states_(lanes) {}

template <typename Ready>
void Gate::wait(std::unique_lock<std::mutex>& lock, Ready ready) {
  if (ready()) return;
  const double begun = steady_seconds();
  changed_.wait(lock, ready);
  waited_seconds_ += steady_seconds() - begun;
}

void Gate::begin(Lane lane, std::shared_ptr<const Demand> demand) {
  check(*demand);
  std::unique_lock lock(mutex_);
  wait(lock, [&] { return may_begin(lane); });
  assign(lane, std::move(demand));
}

bool Gate::try_begin(Lane lane, std::shared_ptr<const Demand> demand) {
  check(*demand);
  std::lock_guard lock(mutex_);
  if (!may_begin(lane)) return false;
  assign(lane, std::move(demand));
  return true;
}

std::optional<Mark> Gate::enter(Lane lane) {
  std::unique_lock lock(mutex_);
  LaneState& state = state_of(lane, /*running=*/false);
  if (!may_enter(lane)) {
    state.waiting = true;
    ++waits_;
    wait(lock, [&] { return may_enter(lane); });
  }
  return take(lane);
}

bool Gate::try_enter(Lane lane) {
  std::lock_guard lock(mutex_);
  LaneState& state = state_of(lane, /*running=*/false);
  const bool may = may_enter(lane);
  if (may) {
    take(lane);
  } else {
    if (!state.waiting) ++waits_;
    state.waiting = true;
  }
  return may;
}

void Gate::leave(Lane lane, const Mark& mark) {
  {
    std::lock_guard lock(mutex_);
    LaneState& state = state_of(lane, /*running=*/true);
    const std::size_t reach = state.demand->during[state.done];
    if (mark.event) {
      while (!state.pending_marks.empty() && state.pending_marks.back().first <= reach)
        state.pending_marks.pop_back();
      state.pending_marks.emplace_back(reach, mark);
    }
    state.running = false;
    ++state.done;
  }
  changed_.notify_all();
}

void Gate::end(Lane lane) {
  {
    std::lock_guard lock(mutex_);
    LaneState& state = states_.at(lane);
    state.demand = nullptr;
    state.done = 0;
    state.running = state.waiting = false;
  }
  changed_.notify_all();
}

bool Gate::is_awaited(Lane lane) {
  std::lock_guard lock(mutex_);
  const LaneState* other = neighbour(lane);
  return other != nullptr && other->waiting;
}

std::size_t Gate::waits() const {
  std::lock_guard lock(mutex_);
  return waits_;
}

double Gate::waited_seconds() const {
  std::lock_guard lock(mutex_);
  return waited_seconds_;
}

// The state of a lane in the middle of a step, which runs a group or has one to run next.
Gate::LaneState& Gate::state_of(Lane lane, bool running) {
  LaneState& state = states_.at(lane);
  if (!state.demand || state.done == state.demand->groups() || state.running != running) {
    throw std::logic_error("lane " + std::to_string(lane) + " has no group to " +
                           (running ? "leave" : "enter"));
  }
  return state;
}

Gate::LaneState* Gate::neighbour(Lane lane) {
  const std::size_t other = static_cast<std::size_t>(lane) ^ 1;
  return other < states_.size() ? &states_[other] : nullptr;
}

void Gate::check(const Demand& demand) const {
  if (demand.most() > range_) {
    throw std::invalid_argument("a step that needs " + std::to_string(demand.most()) +
                                " bytes does not fit a range of " + std::to_string(range_));
  }
}

bool Gate::may_enter(Lane lane) {
  const LaneState& state = states_.at(lane);
  const LaneState* other = neighbour(lane);
  if (other == nullptr || !other->demand || other->done == other->demand->groups()) return true;
  const std::size_t theirs =
      other->running ? other->demand->during[other->done] : other->demand->after[other->done];
  if (state.demand->during[state.done] + theirs > range_) return false;
  return safe_states(state, *other)(state.done + 1, other->done + (other->running ? 1 : 0));
}

const SafeStates& Gate::safe_states(const LaneState& a, const LaneState& b) {
  const Steps steps{a.demand, b.demand};
  const auto found = safe_states_.find(steps);
  if (found != safe_states_.end()) return found->second;
  return safe_states_.emplace(steps, SafeStates(*a.demand, *b.demand, range_)).first->second;
}

void Gate::assign(Lane lane, std::shared_ptr<const Demand> demand) {
  LaneState& state = states_.at(lane);
  if (state.demand) throw std::logic_error("lane " + std::to_string(lane) + " is in a step");
  state.demand = std::move(demand);
  state.done = 0;
}

std::optional<Mark> Gate::take(Lane lane) {
  LaneState& state = states_[lane];
  if (state.waiting) changed_.notify_all();  // the neighbour's next step may have waited for this
  state.waiting = false;
  state.running = true;
  const LaneState* other = neighbour(lane);
  if (other == nullptr) return std::nullopt;
  // The last of those that reach into what this group takes; the lane is in order, so those before
  // it are done then, too.
  const std::size_t mine = state.demand->during[state.done];
  for (auto entry = other->pending_marks.rbegin(); entry != other->pending_marks.rend(); ++entry) {
    if (entry->first + mine > range_) return entry->second;
  }
  return std::nullopt;
}

}  // namespace waterflow
