#include "rounds.h"

#include <chrono>
#include <utility>

namespace waterflow {
namespace {

// Long enough to bridge the jitter of two lanes that finish a pair together, short enough not to
// take a core from a kernel's threads.
constexpr auto kSpin = std::chrono::microseconds(30);

double now() {
  using namespace std::chrono;
  return duration<double>(steady_clock::now().time_since_epoch()).count();
}

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

LanePool::LanePool(std::shared_ptr<Arena> arena, int lanes)
    : arena_(std::move(arena)), lanes_(lanes), spans_(lanes) {}

void LanePool::serve(int lane) {
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
  arena_->synchronize();
  for (const RoundJob& job : round.jobs) {
    if (job.script) job.script->close(*arena_, job.id);
  }
  RoundResult result{std::move(errors_), {}};
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
      if (remaining_[pair].fetch_sub(1) == 1) {  // the last of its pair
        arena_->synchronize();
        pairs_done_.arrive();
      }
    }
  }
}

void LanePool::run_task(const Task& task) {
  if (errors_[task.job]) return;  // an earlier group of this step failed
  const RoundJob& job = round_->jobs[task.job];
  LaneScope scope({arena_, task.lane, job.id, job.script.get()});
  const double start = now();
  try {
    job.tape->run(task.start, task.stop);
  } catch (...) {
    errors_[task.job] = std::current_exception();
  }
  spans_[task.lane].push_back({task.lane, task.job, task.group, start, now()});
}

void LanePool::shutdown() {
  {
    std::lock_guard lock(mutex_);
    stop_.store(true);
  }
  wake_.notify_all();
}

}  // namespace waterflow
