#include "core/plan/flow_simulation.h"

#include <algorithm>
#include <queue>
#include <stdexcept>
#include <string>
#include <tuple>

namespace waterflow {
namespace {

// Steps of the job that is behind all others; the first ones only fill the pipeline.
constexpr std::size_t kSteps = 6, kWarmUp = 2;
// No simulation is longer than this many groups.
constexpr std::size_t kMostGroups = 40'000;
// Beside jobs that go first others may get nowhere: after so many steps of those that is known.
constexpr std::size_t kMostSteps = 100;

class Simulation {
 public:
  Simulation(const std::vector<FlowingJob>& jobs, std::size_t range, int lanes, int open_to_others,
             const NextJob& next_job)
      : jobs_(jobs),
        next_job_(next_job),
        open_to_others_(open_to_others),
        gate_(range, lanes),
        states_(jobs.size()),
        lanes_(lanes),
        has_others_(std::any_of(jobs.begin(), jobs.end(),
                                [](const FlowingJob& job) { return !job.goes_first; })) {
    course_.end.worked.resize(jobs.size());
  }

  FlowCourse run() {
    bool warming = true;
    course_.warm = course_.end;
    dispatch();
    for (std::size_t groups = 1; !events_.empty(); ++groups) {
      finish_group(advance());
      dispatch();
      const std::size_t least = least_steps(false);
      // Beside a step that is hundreds of times shorter, a long one does not get that far.
      if (warming && (least >= kWarmUp || groups >= kMostGroups / 2)) {
        warming = false;
        course_.end.waits = gate_.waits();
        course_.warm = course_.end;
      }
      if (least >= kSteps || groups >= kMostGroups) break;
      if (has_others_ && least_steps(true) >= kMostSteps) break;
    }
    course_.end.waits = gate_.waits();
    return std::move(course_);
  }

 private:
  struct JobState {
    double used = 0;  // seconds of lanes, by its weight
    std::size_t steps = 0, group = 0;
    bool on_lane = false;
  };
  struct LaneState {
    std::size_t job = 0;
    bool taken = false, running = false;
  };
  using Event = std::tuple<double, std::size_t, Lane>;  // when, its number, whose group ends

  std::size_t least_steps(bool of_first) const {
    std::size_t least = kMostGroups;
    for (std::size_t job = 0; job < jobs_.size(); ++job) {
      if (jobs_[job].goes_first || !of_first) least = std::min(least, states_[job].steps);
    }
    return least;
  }

  // Goes on to the next event and returns its lane.
  Lane advance() {
    const auto [time, number, lane] = events_.top();
    FlowMarks& so_far = course_.end;
    const double passed = time - so_far.now;
    const std::size_t working = events_.size();
    events_.pop();
    (working > 1 ? so_far.both : so_far.alone) += passed;
    so_far.work += passed * static_cast<double>(working);
    for (const LaneState& each : lanes_) {
      if (each.running) so_far.worked[each.job] += passed;
    }
    so_far.now = time;
    return lane;
  }

  void finish_group(Lane lane) {
    LaneState& here = lanes_[lane];
    JobState& job = states_[here.job];
    gate_.leave(lane, Mark{});
    here.running = false;
    if (++job.group < jobs_[here.job].seconds.size()) return;
    gate_.end(lane);
    here.taken = false;
    job.on_lane = false;
    ++job.steps;
  }

  // Starts whatever may start; what has been started may let lanes go on that were asked before.
  void dispatch() {
    for (bool progress = true; progress;) {
      progress = false;
      for (Lane lane = 0; lane < static_cast<Lane>(lanes_.size()) && !progress; ++lane) {
        progress = start(lane);
      }
    }
  }

  bool start(Lane lane) {
    LaneState& here = lanes_[lane];
    if (here.running || !(here.taken || take_job(lane)) || !gate_.try_enter(lane)) return false;
    JobState& job = states_[here.job];
    const FlowingJob& made = jobs_[here.job];
    const double seconds = made.seconds[job.group], now = course_.end.now;
    job.used += seconds / made.weight;
    here.running = true;
    course_.spans.push_back({now, now + seconds, lane, here.job, job.group});
    events_.emplace(now + seconds, ++events_made_, lane);
    return true;
  }

  // Gives the lane to a job that is on none, if there is one that may begin.
  bool take_job(Lane lane) {
    int others = 0;
    for (const LaneState& each : lanes_) others += each.taken && !jobs_[each.job].goes_first;
    std::vector<std::pair<std::size_t, double>> free;
    for (std::size_t job = 0; job < jobs_.size(); ++job) {
      const bool may = others < open_to_others_ || jobs_[job].goes_first;
      if (may && !states_[job].on_lane) free.emplace_back(job, states_[job].used);
    }
    if (free.empty()) return false;
    const std::size_t place = next_job_(free);
    if (place >= free.size()) {
      throw std::invalid_argument("of " + std::to_string(free.size()) + " jobs the one at place " +
                                  std::to_string(place) + " was chosen");
    }
    const std::size_t job = free[place].first;
    if (!gate_.try_begin(lane, jobs_[job].demand)) return false;
    states_[job].on_lane = true;
    states_[job].group = 0;
    lanes_[lane].job = job;
    lanes_[lane].taken = true;
    return true;
  }

  const std::vector<FlowingJob>& jobs_;
  const NextJob& next_job_;
  const int open_to_others_;
  Gate gate_;
  std::vector<JobState> states_;
  std::vector<LaneState> lanes_;
  const bool has_others_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::size_t events_made_ = 0;
  FlowCourse course_;
};

}  // namespace

FlowCourse simulate_flow(const std::vector<FlowingJob>& jobs, std::size_t range, int lanes,
                         int open_to_others, const NextJob& next_job) {
  return Simulation(jobs, range, lanes, open_to_others, next_job).run();
}

}  // namespace waterflow
