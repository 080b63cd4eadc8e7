#include "core/plan/throttle.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/arena/mark.h"

namespace waterflow {
namespace {

// Rests shorter than this are put together: to sleep and wake takes a good part of it.
constexpr double kShortestRest = 200e-6;
// Who rests looks so often whether he is waited for.
constexpr double kLook = 1e-3;

}  // namespace

void Precedence::enter() {
  std::lock_guard lock(mutex_);
  if (working_.load(std::memory_order_relaxed) == 0) since_ = steady_seconds();
  working_.fetch_add(1, std::memory_order_release);
}

void Precedence::leave() {
  {
    std::lock_guard lock(mutex_);
    if (working_.load(std::memory_order_relaxed) == 0) {
      throw std::logic_error("no job that goes first is at work");
    }
    if (working_.fetch_sub(1, std::memory_order_release) > 1) return;
    seconds_ += steady_seconds() - since_;
  }
  changed_.notify_all();
}

double Precedence::seconds() const {
  std::lock_guard lock(mutex_);
  return seconds_ + (is_busy() ? steady_seconds() - since_ : 0);
}

void Precedence::hold(bool holds) {
  {
    std::lock_guard lock(mutex_);
    holds_.store(holds, std::memory_order_release);
  }
  if (!holds) changed_.notify_all();
}

void Precedence::wait(double seconds) {
  std::unique_lock lock(mutex_);
  const bool held = holds();
  changed_.wait_for(lock, std::chrono::duration<double>(seconds),
                    [&] { return !is_busy() || (held && !holds()); });
}

Throttle::Throttle(std::shared_ptr<Precedence> precedence, std::shared_ptr<const Signal> signal)
    : precedence_(std::move(precedence)),
      signal_(std::move(signal)),
      settled_(precedence_->seconds()) {}

void Throttle::set_duty(double duty) {
  if (!(duty >= 0 && duty <= 1)) {
    throw std::invalid_argument("a duty is a share from 0 to 1, got " + std::to_string(duty));
  }
  std::lock_guard lock(mutex_);
  settle();
  duty_ = duty;
  is_throttled_.store(duty < 1, std::memory_order_relaxed);
  if (duty == 1) debt_ = 0;
}

double Throttle::duty() const {
  std::lock_guard lock(mutex_);
  return duty_;
}

void Throttle::begin() {
  std::lock_guard lock(mutex_);
  settle();
  working_ = true;
  seen_ = signal_->calls();
}

void Throttle::end() {
  std::lock_guard lock(mutex_);
  settle();
  working_ = false;
}

void Throttle::pause(const std::function<bool()>& awaited) {
  // Asked before each operator, and most often for nothing: without a lock, least of all one that
  // another lane asks for as often.
  if (is_first() || !precedence_->is_busy()) return;
  if (!is_throttled_.load(std::memory_order_relaxed) && !precedence_->holds()) return;
  std::unique_lock lock(mutex_);
  if (settle() < kShortestRest && !is_held()) return;
  const double begun = steady_seconds();
  const bool worked = std::exchange(working_, false);
  while (true) {
    const double due = is_held() ? kLook : settle();
    if (due <= 0 || !precedence_->is_busy() || signal_->calls() != seen_ || awaited()) break;
    lock.unlock();  // whoever sets the duty does not wait for the rest
    precedence_->wait(std::min(due, kLook));
    lock.lock();
  }
  working_ = worked;
  rested_ += steady_seconds() - begun;
}

void Throttle::owe(double seconds) {
  if (!precedence_->is_busy()) return;
  std::lock_guard lock(mutex_);
  settle();
  seen_ = signal_->calls();
  if (duty_ > 0) debt_ += seconds * (1 - duty_) / duty_;
}

void Throttle::step_done(std::int64_t kind) {
  std::shared_ptr<Alternation> comparison;
  {
    std::lock_guard lock(mutex_);
    comparison = comparison_;
  }
  if (comparison) comparison->step_done(kind);
}

void Throttle::compare(std::shared_ptr<Alternation> comparison) {
  std::lock_guard lock(mutex_);
  comparison_ = std::move(comparison);
}

bool Throttle::may_begin() {
  std::lock_guard lock(mutex_);
  const double due = settle();
  return due <= 0 || !precedence_->is_busy();
}

double Throttle::due() {
  std::lock_guard lock(mutex_);
  return settle();
}

double Throttle::rested_seconds() const {
  std::lock_guard lock(mutex_);
  return rested_;
}

bool Throttle::is_held() const { return precedence_->holds() && !is_first(); }

// With the lock held.
double Throttle::settle() {
  const double now = precedence_->seconds();
  const double passed = now - std::exchange(settled_, now);
  if (duty_ == 1) return 0;
  if (duty_ == 0) return std::numeric_limits<double>::infinity();
  debt_ = working_ ? debt_ + passed * (1 - duty_) / duty_ : std::max(0.0, debt_ - passed);
  return debt_;
}

}  // namespace waterflow
