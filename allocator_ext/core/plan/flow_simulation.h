// How steps flow, by the clock of their profiles; nothing runs.
//
// The decisions are those of a run: the same gate admits the groups. What is assumed is that lanes
// do not slow each other down.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "core/arena/types.h"
#include "core/plan/gate.h"

namespace waterflow {

// A job that takes the same step again and again.
struct FlowingJob {
  std::shared_ptr<const Demand> demand;
  std::vector<double> seconds;  // of each node group
  double weight;                // its share of the lanes' time
  bool goes_first;              // it is of the highest priority there is
};

// A node group on a lane.
struct FlowSpan {
  double start, stop;  // seconds
  Lane lane;
  std::size_t job, group;
};

// What has happened up to a moment.
struct FlowMarks {
  double now = 0;
  double alone = 0;  // seconds with one lane at work
  double both = 0;   // with more than one
  double work = 0;   // of all lanes, added up
  std::size_t waits = 0;
  std::vector<double> worked;  // seconds of each job
};

struct FlowCourse {
  FlowMarks warm;  // when the pipeline was full
  FlowMarks end;
  std::vector<FlowSpan> spans;
};

// From the jobs that could take a lane, each with the seconds that it has had by its weight, to the
// place of the one that does.
using NextJob = std::function<std::size_t(const std::vector<std::pair<std::size_t, double>>&)>;

// Lets jobs flow until each has made some steps, or until it is known that those behind get
// nowhere.
//
// `range`: bytes for each two lanes; `open_to_others`: so many lanes are for jobs that do not go
// first. Throws std::invalid_argument where a step does not fit the range even alone, or `next_job`
// names no job.
FlowCourse simulate_flow(const std::vector<FlowingJob>& jobs, std::size_t range, int lanes,
                         int open_to_others, const NextJob& next_job);

}  // namespace waterflow
