// Who held how much when: samples for the report's picture, in constant memory however long the
// run. Once full, every second sample of each job goes, and each job is sampled at every second
// event of before. Counting events, not time, spares the events between samples the clock, so the
// longer the run, the less a sample costs. Peaks may fall between; the allocator counts those. That
// a job holds nothing any more is always sampled, or a finished job would seem to hold memory.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/arena/types.h"

namespace waterflow {

class Timeline {
 public:
  explicit Timeline(std::size_t max_samples = 20'000);

  void add(JobId job, std::size_t held);                           // what the job holds now
  void add_at(double clock_seconds, JobId job, std::size_t held);  // what it held, steady clock

  bool enabled() const { return enabled_; }
  void enable(bool on) { enabled_ = on; }
  void clear();  // and starts the clock again

  std::size_t size() const { return seconds_.size(); }
  const std::vector<double>& seconds() const { return seconds_; }
  const std::vector<std::int32_t>& jobs() const { return jobs_; }
  const std::vector<std::uint64_t>& held() const { return held_; }

 private:
  using Clock = std::chrono::steady_clock;

  bool skip(JobId job, std::size_t held);
  void append(double seconds, JobId job, std::size_t held);
  void thin();

  bool enabled_ = true;
  std::size_t max_samples_;
  std::uint64_t stride_ = 1;
  Clock::time_point start_ = Clock::now();
  std::vector<std::uint64_t> skips_;  // by job: events until its next sample
  std::vector<double> seconds_;
  std::vector<std::int32_t> jobs_;
  std::vector<std::uint64_t> held_;
};

}  // namespace waterflow
