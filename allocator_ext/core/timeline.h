// Who held how much when: samples for the report's picture, in constant memory however long the
// run. When full, every second sample of each job goes and the least interval doubles. Peaks may
// fall between samples; the allocator counts those exactly.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/types.h"

namespace waterflow {

class Timeline {
 public:
  explicit Timeline(std::size_t max_samples = 20'000);

  // Samples what the job holds now.
  void add(JobId job, std::size_t held);
  void add_at(double seconds, JobId job, std::size_t held);

  bool enabled() const { return enabled_; }
  void enable(bool on) { enabled_ = on; }
  void clear();  // and starts the clock again

  std::size_t size() const { return seconds_.size(); }
  const std::vector<double>& seconds() const { return seconds_; }
  const std::vector<std::int32_t>& jobs() const { return jobs_; }
  const std::vector<std::uint64_t>& held() const { return held_; }

 private:
  using Clock = std::chrono::steady_clock;
  struct Pace {
    double last = -1e300;   // when the job was last sampled
    bool keep_next = true;  // for the thinning, job by job: all keep their shape
  };

  void thin();

  bool enabled_ = true;
  std::size_t max_samples_;
  double interval_ = 0;
  Clock::time_point start_ = Clock::now();
  std::vector<Pace> paces_;
  std::vector<double> seconds_;
  std::vector<std::int32_t> jobs_;
  std::vector<std::uint64_t> held_;
};

}  // namespace waterflow
