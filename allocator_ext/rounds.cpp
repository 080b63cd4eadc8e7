#include "rounds.h"

#include <chrono>
#include <utility>

namespace waterflow {
namespace {

// Long enough to bridge the jitter of two lanes that finish a pair together, short enough not to
// take a core from a kernel's threads.
constexpr auto kSpin = std::chrono::microseconds(30);

template <typename Ready>
bool spin(Ready ready) {
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 64; ++i) {
      if (ready()) return true;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return ready();
}

}  // namespace

void CounterBarrier::arrive() {
  {
    std::lock_guard lock(mutex_);
    count_.fetch_add(1, std::memory_order_release);
  }
  changed_.notify_all();
}

void CounterBarrier::wait_until(int count) {
  auto reached = [&] { return count_.load(std::memory_order_acquire) >= count; };
  if (spin(reached)) return;
  std::unique_lock lock(mutex_);
  changed_.wait(lock, reached);
}

LanePool::LanePool(std::shared_ptr<Arena> arena, int lanes, std::shared_ptr<LaneDevice> device)
    : arena_(std::move(arena)), lanes_(lanes), device_(std::move(device)), spans_(lanes) {}

void LanePool::serve(int lane) {
  device_->bind(lane);
  std::uint64_t seen = 0;
  while (true) {
    auto called = [&] { return generation_.load() != seen || stop_.load(); };
    if (!spin(called)) {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, called);
    }
    if (stop_.load()) return;
    seen = generation_.load();
    run_lane(lane);
    lanes_done_.arrive();
  }
}

RoundResult LanePool::run(const Round& round) {
  round_ = &round;
  errors_.assign(round.jobs.size(), nullptr);
  std::vector<std::atomic<bool>>(round.jobs.size()).swap(failed_);
  failure_ = nullptr;
  broken_.store(false);
  arena_->synchronize();  // what Python did on lane 0 since the last round comes first
  for (auto& spans : spans_) spans.clear();
  std::vector<std::atomic<int>> remaining(round.pairs.size());
  for (std::size_t pair = 0; pair < round.pairs.size(); ++pair) {
    remaining[pair].store(static_cast<int>(round.pairs[pair].size()));
  }
  remaining_.swap(remaining);
  pairs_done_.reset();
  lanes_done_.reset();
  {
    std::lock_guard lock(mutex_);
    generation_.fetch_add(1);
  }
  if (lanes_ > 1) wake_.notify_all();
  run_lane(0);
  lanes_done_.wait_until(lanes_ - 1);
  settle();
  for (const RoundJob& job : round.jobs) {  // also of a round that failed: their blocks live on
    if (job.script) job.script->close(*arena_);
  }
  if (failure_) std::rethrow_exception(failure_);
  RoundResult result{std::move(errors_), {}, {}, device_->mark(0), device_};
  for (const RoundJob& job : round.jobs) result.losses.push_back(job.tape->loss());
  for (auto& spans : spans_) result.spans.insert(result.spans.end(), spans.begin(), spans.end());
  return result;
}

void LanePool::run_lane(int lane) {
  const auto& pairs = round_->pairs;
  for (std::size_t pair = 0; pair < pairs.size(); ++pair) {
    for (const Task& task : pairs[pair]) {
      if (task.lane != lane) continue;
      pairs_done_.wait_until(static_cast<int>(pair));
      run_task(task);
      if (remaining_[pair].fetch_sub(1) == 1) finish_pair();  // the last of its pair
    }
  }
}

void LanePool::finish_pair() {
  try {
    if (!broken_.load()) arena_->synchronize();
  } catch (...) {
    note_failure();
    broken_.store(true);
  }
  pairs_done_.arrive();  // in any case: the other lanes wait for it
}

void LanePool::run_task(const Task& task) {
  // An earlier group of this step failed, or the device is lost.
  if (failed_[task.job].load() || broken_.load()) return;
  try {
    execute(task);
  } catch (...) {
    fail(task.job);
    settle();  // groups of the step that are queued still use its tape
    const RoundJob& job = round_->jobs[task.job];
    LaneScope scope({arena_, task.lane, job.id, job.script.get()});
    abandon(task);
  }
}

// Others are to get the places of a failed step as planned: it must let go of them now.
void LanePool::abandon(const Task& task) {
  const RoundJob& job = round_->jobs[task.job];
  job.tape->abandon();
  if (job.script) job.script->abandon(*arena_, task.lane);
}

// What is still queued uses the round and its scripts: a wait that fails is tried once more. If it
// fails again the device is lost, and nothing that was queued will run.
void LanePool::settle() {
  for (int attempt = 0; attempt < 2; ++attempt) {
    try {
      device_->settle();
      return;
    } catch (...) {
      note_failure();
    }
  }
}

void LanePool::note_failure() {
  std::lock_guard lock(mutex_);
  if (!failure_) failure_ = std::current_exception();
}

void LanePool::fail(int job) {
  errors_[job] = std::current_exception();
  failed_[job].store(true);
}

void LanePool::execute(const Task& task) {
  const RoundJob& job = round_->jobs[task.job];
  if (job.inbox && task.start == 0) device_->hold_back(task.lane, job.inbox->filled());
  const Mark start = device_->mark(task.lane);
  device_->execute(task.lane, [this, &job, &task] {
    if (failed_[task.job].load()) return;
    LaneScope scope({arena_, task.lane, job.id, job.script.get()});
    try {
      job.tape->run(task.start, task.stop);
    } catch (...) {
      fail(task.job);
      abandon(task);
    }
  });
  spans_[task.lane].push_back({task.lane, task.job, task.group, start, device_->mark(task.lane)});
  const bool read_batch = task.start < job.tape->loads() && task.stop >= job.tape->loads();
  if (job.inbox && read_batch) device_->record(task.lane, job.inbox->emptied());
}

void LanePool::shutdown() {
  {
    std::lock_guard lock(mutex_);
    stop_.store(true);
  }
  wake_.notify_all();
}

}  // namespace waterflow
