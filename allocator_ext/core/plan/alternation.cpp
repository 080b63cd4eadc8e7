#include "core/plan/alternation.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/arena/mark.h"
#include "core/plan/throttle.h"

namespace waterflow {
namespace {

// Steps that do not count after the others were held or let go: work of theirs may still go on, or
// not have begun. How many is left to chance: else turns keep step with the job's epochs, and those
// alone have other parts of them than those beside the others.
constexpr int kLeastSettling = 1, kMostSettling = 2;
// A turn alone takes at least so long, and one beside the others.
constexpr double kAloneSeconds = 0.005, kBesideSeconds = 0.015;
// What differs from the middle of all comparisons by more than this counts for no more, either way:
// a pause of the whole process is nobody's harm, nor is a machine that changes its speed by half
// between two turns.
const double kOutlier = std::log(1.15);
// Comparisons before anything is said, and the standard error that is good enough: of a percent, or
// of what is tolerated.
constexpr std::size_t kFewest = 12;
constexpr double kExact = 0.5, kPercent = 0.01;
// Comparisons that lie further from each other are taken to be independent.
constexpr int kLags = 6;
// So many standard errors above what is tolerated are harm at once. Few comparisons do not know
// their own error well: it is taken for greater by this over their number.
constexpr double kSure = 4, kUnsure = 4;

}  // namespace

Alternation::Alternation(std::shared_ptr<Precedence> precedence, double tolerance,
                         double most_seconds)
    : precedence_(std::move(precedence)),
      tolerance_(tolerance),
      most_seconds_(most_seconds),
      error_(std::numeric_limits<double>::infinity()) {
  if (!(tolerance > 0)) {
    throw std::invalid_argument("a tolerance is above 0, got " + std::to_string(tolerance));
  }
  settling_ = settling();
  hold(true);
}

void Alternation::begin() {
  std::lock_guard lock(mutex_);
  since_ = steady_seconds();
  told_ = 0;
  disturbed_ = precedence_->is_disturbed();
}

void Alternation::step_done(std::int64_t kind) {
  std::lock_guard lock(mutex_);
  ++told_;
  const double now = steady_seconds();
  const bool disturbed = std::exchange(disturbed_, precedence_->is_disturbed());
  add(kind, now - std::exchange(since_, now), 1, disturbed);
}

void Alternation::leave(std::int64_t kind, int steps) {
  std::lock_guard lock(mutex_);
  if (steps > told_) add(kind, steady_seconds() - since_, steps - told_, disturbed_);
}

void Alternation::note(std::int64_t kind, double seconds, int steps, bool disturbed) {
  std::lock_guard lock(mutex_);
  add(kind, seconds, steps, disturbed);
}

void Alternation::stop() {
  std::lock_guard lock(mutex_);
  hold(false);
  stopped_ = true;
}

bool Alternation::holds() const {
  std::lock_guard lock(mutex_);
  return holds_;
}

std::optional<Harm> Alternation::harm() const {
  std::lock_guard lock(mutex_);
  if (ratios_.size() < kFewest) return std::nullopt;
  const bool certain = mean_ - kSure * error_ > tolerance_;
  const bool exact = error_ < kExact * std::min(tolerance_, kPercent);
  if (!certain && !exact && seconds_ <= most_seconds_) return std::nullopt;
  return Harm{std::expm1(mean_), error_};
}

void Alternation::add(std::int64_t kind, double seconds, int steps, bool disturbed) {
  if (stopped_ || (holds_ && disturbed)) return;
  if (settling_ > 0) {
    --settling_;
    return;
  }
  Taken& taken = turn_[kind];
  taken.seconds += seconds;
  taken.steps += steps;
  seconds_ += seconds;
  turn_seconds_ += seconds;
  if (turn_seconds_ >= (holds_ ? kAloneSeconds : kBesideSeconds)) end_turn();
}

void Alternation::end_turn() {
  if (holds_) {
    std::unordered_map<std::int64_t, double> alone;
    for (const auto& [kind, taken] : turn_) alone[kind] = taken.seconds / taken.steps;
    compare(alone);
    for (const auto& [kind, seconds] : alone) alone_[kind] = seconds;
    turn_.clear();
  } else {
    beside_ = std::exchange(turn_, {});
  }
  turn_seconds_ = 0;
  settling_ = settling();
  hold(!holds_);
}

// The last turn beside the others, with the turns alone before it and after it; a kind of steps
// that was not made after it with what it took before it.
void Alternation::compare(const std::unordered_map<std::int64_t, double>& after) {
  double took = 0, expected = 0;
  for (const auto& [kind, taken] : beside_) {
    const auto before = alone_.find(kind);
    if (before == alone_.end()) continue;
    const auto behind = after.find(kind);
    const double later = behind == after.end() ? before->second : behind->second;
    took += taken.seconds;
    expected += taken.steps * (before->second + later) / 2;
  }
  if (!(expected > 0)) return;
  ratios_.push_back(std::log(took / expected));
  if (ratios_.size() >= kFewest) estimate();
}

// The mean of the ratios, each as far from their median as counts, and its standard error (the
// M-estimate of location after one step; Huber, Robust Estimation of a Location Parameter, 1964).
void Alternation::estimate() {
  std::vector<double> sorted = ratios_;
  const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2);
  std::nth_element(sorted.begin(), middle, sorted.end());
  const double median = *middle, count = static_cast<double>(ratios_.size());
  const auto off_median = [median](double ratio) {
    return std::clamp(ratio - median, -kOutlier, kOutlier);
  };
  double off = 0;
  for (const double ratio : ratios_) off += off_median(ratio) / count;
  mean_ = median + off;
  // A turn alone is in the ratios before it and after it, and a machine's moods last for several:
  // these are not independent (Newey, West, A Simple, Positive Semi-definite ... Covariance Matrix,
  // 1987).
  std::vector<double> offs;
  for (const double ratio : ratios_) offs.push_back(off_median(ratio) - off);
  const double alone = std::inner_product(offs.begin(), offs.end(), offs.begin(), 0.0);
  double spread = alone;
  for (int lag = 1; lag <= kLags; ++lag) {
    const double both = std::inner_product(offs.begin() + lag, offs.end(), offs.begin(), 0.0);
    spread += 2 * both * (kLags + 1 - lag) / (kLags + 1);
  }
  spread = std::max(spread, alone);
  error_ = (1 + kUnsure / count) * std::sqrt(spread / count / (count - 1));
}

void Alternation::hold(bool holds) {
  holds_ = holds;
  precedence_->hold(holds);
}

int Alternation::settling() {
  return std::uniform_int_distribution(kLeastSettling, kMostSettling)(chance_);
}

}  // namespace waterflow
