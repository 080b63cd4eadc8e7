#include "core/arena/timeline.h"

#include <algorithm>

namespace waterflow {

Timeline::Timeline(std::size_t max_samples) : max_samples_(std::max<std::size_t>(max_samples, 2)) {}

void Timeline::add(JobId job, std::size_t held) {
  if (!enabled_ || skip(job, held)) return;
  append(std::chrono::duration<double>(Clock::now() - start_).count(), job, held);
}

void Timeline::add_at(double clock_seconds, JobId job, std::size_t held) {
  if (!enabled_ || skip(job, held)) return;
  const auto start = std::chrono::duration<double>(start_.time_since_epoch()).count();
  append(clock_seconds - start, job, held);
}

bool Timeline::skip(JobId job, std::size_t held) {
  if (static_cast<std::size_t>(job) >= skips_.size()) skips_.resize(job + 1);
  if (skips_[job] == 0 || held == 0) return false;
  --skips_[job];
  return true;
}

void Timeline::append(double seconds, JobId job, std::size_t held) {
  if (size() >= max_samples_) thin();
  skips_[job] = stride_ - 1;
  seconds_.push_back(seconds);
  jobs_.push_back(job);
  held_.push_back(held);
}

void Timeline::thin() {
  stride_ *= 2;
  // From the end, so that each job keeps its newest sample.
  std::vector<bool> keep(size());
  std::vector<bool> drop_next(skips_.size());
  for (std::size_t at = size(); at-- > 0;) {
    keep[at] = !drop_next[jobs_[at]];
    drop_next[jobs_[at]] = keep[at];
  }
  std::size_t kept = 0;
  for (std::size_t at = 0; at < size(); ++at) {
    // With a sample or two each of very many jobs hardly any would go; then the rest does.
    if (!keep[at] || kept > max_samples_ * 3 / 4) continue;
    seconds_[kept] = seconds_[at];
    jobs_[kept] = jobs_[at];
    held_[kept++] = held_[at];
  }
  seconds_.resize(kept);
  jobs_.resize(kept);
  held_.resize(kept);
}

void Timeline::clear() {
  seconds_.clear();
  jobs_.clear();
  held_.clear();
  skips_.clear();
  stride_ = 1;
  start_ = Clock::now();
}

}  // namespace waterflow
