#include "core/timeline.h"

#include <algorithm>

namespace waterflow {

Timeline::Timeline(std::size_t max_samples) : max_samples_(std::max<std::size_t>(max_samples, 2)) {}

void Timeline::add(JobId job, std::size_t held) {
  if (!enabled_) return;
  add_at(std::chrono::duration<double>(Clock::now() - start_).count(), job, held);
}

void Timeline::add_at(double seconds, JobId job, std::size_t held) {
  if (static_cast<std::size_t>(job) >= paces_.size()) paces_.resize(job + 1);
  if (seconds - paces_[job].last < interval_) return;
  if (size() >= max_samples_) thin();
  paces_[job].last = seconds;
  seconds_.push_back(seconds);
  jobs_.push_back(job);
  held_.push_back(held);
}

void Timeline::thin() {
  // The first interval is the one that would have just filled the samples with one job's.
  const double span = seconds_.back() - seconds_.front();
  interval_ = std::max(2 * interval_, span / static_cast<double>(max_samples_));
  std::size_t kept = 0;
  for (std::size_t at = 0; at < size(); ++at) {
    Pace& pace = paces_[jobs_[at]];
    if (pace.keep_next) {
      seconds_[kept] = seconds_[at];
      jobs_[kept] = jobs_[at];
      held_[kept++] = held_[at];
    }
    pace.keep_next = !pace.keep_next;
  }
  // With one sample each of very many jobs none would go: then the oldest half does.
  const std::size_t from = kept > max_samples_ * 3 / 4 ? kept / 2 : 0;
  const auto keep = [&](auto& values) {
    values.resize(kept);
    values.erase(values.begin(), values.begin() + from);
  };
  keep(seconds_);
  keep(jobs_);
  keep(held_);
}

void Timeline::clear() {
  seconds_.clear();
  jobs_.clear();
  held_.clear();
  paces_.clear();
  interval_ = 0;
  start_ = Clock::now();
}

}  // namespace waterflow
