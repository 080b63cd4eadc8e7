#include "runtime/lane_pool.h"

#include <algorithm>
#include <chrono>
#include <optional>
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

// A step at its gate, which it leaves whatever happens: the other lane may wait for its memory.
class GateScope {
 public:
  GateScope(Gate& gate, Lane lane, std::shared_ptr<const Demand> demand)
      : gate_(gate), lane_(lane) {
    gate_.begin(lane_, std::move(demand));
  }
  GateScope(const GateScope&) = delete;
  GateScope& operator=(const GateScope&) = delete;
  ~GateScope() { gate_.end(lane_); }

 private:
  Gate& gate_;
  const Lane lane_;
};

// A job at work on this thread, as its throttle is to know. Where work is only queued, that is told
// group by group.
class ThrottleScope {
 public:
  ThrottleScope(Throttle* throttle, bool queues) : throttle_(queues ? nullptr : throttle) {
    if (throttle_ != nullptr) throttle_->begin();
  }
  ThrottleScope(const ThrottleScope&) = delete;
  ThrottleScope& operator=(const ThrottleScope&) = delete;
  ~ThrottleScope() {
    if (throttle_ != nullptr) throttle_->end();
  }

 private:
  Throttle* const throttle_;
};

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
    (*work_)(lane);
    lanes_done_.arrive();
  }
}

void LanePool::run_on_all(const std::function<void(int)>& work) {
  work_ = &work;
  failure_ = nullptr;
  lanes_done_.reset();
  {
    std::lock_guard lock(mutex_);
    generation_.fetch_add(1);
  }
  if (lanes_ > 1) wake_.notify_all();
  work(0);
  lanes_done_.wait_until(lanes_ - 1);
}

RoundResult LanePool::run(const Round& round) {
  round_ = &round;
  std::vector<Failure>(round.jobs.size()).swap(failures_);
  broken_.store(false);
  arena_->synchronize();  // what Python did on lane 0 since the last round comes first
  for (auto& spans : spans_) spans.clear();
  std::vector<std::atomic<int>> remaining(round.pairs.size());
  for (std::size_t pair = 0; pair < round.pairs.size(); ++pair) {
    remaining[pair].store(static_cast<int>(round.pairs[pair].size()));
  }
  remaining_.swap(remaining);
  pairs_done_.reset();
  run_on_all([this](int lane) { run_lane(lane); });
  drain();
  for (const RoundJob& job : round.jobs) {  // also of a round that failed: their blocks live on
    if (job.plan) job.plan->close(*arena_);
  }
  rethrow_failure();
  RoundResult result{{}, {}, {}, device_->mark(0), device_, {}};
  for (const Failure& failure : failures_) result.errors.push_back(failure.error);
  for (const RoundJob& job : round.jobs) {
    result.losses.push_back(job.tape->loss());
    result.metrics.push_back(job.tape->metrics());
  }
  for (auto& spans : spans_) result.spans.insert(result.spans.end(), spans.begin(), spans.end());
  return result;
}

void LanePool::run_lane(int lane) {
  set_usual(lane);
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

// In a round all are equal. A lane that cannot be told so keeps what it has.
void LanePool::set_usual(int lane) {
  try {
    device_->set_first(lane, false);
  } catch (...) {
    note_failure();
    broken_.store(true);
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
  const RoundJob& job = round_->jobs[task.job];
  Failure& failure = failures_[task.job];
  // An earlier group of this step failed, or the device is lost.
  if (failure.happened.load() || broken_.load()) return;
  try {
    execute(job, task, failure, spans_[task.lane]);
  } catch (...) {
    failure.note();
    drain();  // groups of the step that are queued still use its tape
    abandon(job, task.lane);
  }
}

// Others are to get the places of a failed step as planned: it must let go of them now.
void LanePool::abandon(const RoundJob& job, Lane lane) {
  LaneScope scope({arena_, lane, job.id, job.plan.get()});
  job.tape->abandon();
  if (job.plan) job.plan->abandon(*arena_, lane);
}

// What is still queued uses the round and its plans.
void LanePool::drain() {
  try {
    device_->drain();
  } catch (...) {
    note_failure();
  }
}

void LanePool::note_failure() {
  std::lock_guard lock(mutex_);
  if (!failure_) failure_ = std::current_exception();
}

void LanePool::rethrow_failure() {
  std::lock_guard lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
}

void LanePool::execute(const RoundJob& job, const Task& task, Failure& failure,
                       std::vector<Span>& spans, const std::function<void()>* pause,
                       Backlog* backlog) {
  if (job.device_input && task.start == 0)
    device_->wait_event(task.lane, job.device_input->filled());
  const Mark start = device_->mark(task.lane);
  if (device_->queues()) {
    run_moving(job, task, failure, backlog);
  } else {
    run_tape(job, task, failure, pause);
  }
  spans.push_back({task.lane, task.job, task.group, start, device_->mark(task.lane)});
  const bool read_batch = task.start < job.tape->loads() && task.stop >= job.tape->loads();
  if (job.device_input && read_batch) device_->record(task.lane, job.device_input->emptied());
}

// In the lane's order: at once, or later, on the stand-in.
void LanePool::run_tape(const RoundJob& job, const Task& task, Failure& failure,
                        const std::function<void()>* pause, const CopyOrder* order) {
  const auto known = order == nullptr ? std::nullopt : std::make_optional(*order);
  device_->execute(task.lane, [this, &job, &failure, task, pause, known] {
    if (failure.happened.load()) return;
    const CopyOrder* order = known ? &*known : nullptr;
    LaneScope scope({arena_, task.lane, job.id, job.plan.get(), nullptr, pause, order});
    try {
      job.tape->run(task.start, task.stop);
    } catch (...) {
      failure.note();
      abandon(job, task.lane);
    }
  });
}

// Queues a group; at the storages' moves the driver has to be told of the copies, too.
void LanePool::run_moving(const RoundJob& job, const Task& task, Failure& failure,
                          Backlog* backlog) {
  Task part = task;
  if (job.tape->away().on_device()) {
    const auto& moves = job.tape->moves();
    auto next = std::lower_bound(moves.begin(), moves.end(), task.start);
    for (; next != moves.end() && *next < task.stop; ++next) {
      part.stop = *next;
      run_pieces(job, part, failure, backlog);
      part.start = *next + 1;
      move(job, {task.lane, task.job, task.group, *next, *next + 1}, failure);
    }
  }
  part.stop = task.stop;
  run_pieces(job, part, failure, backlog);
}

void LanePool::run_pieces(const RoundJob& job, Task task, Failure& failure, Backlog* backlog) {
  const int stop = task.stop;
  while (task.start < stop) {
    if (backlog != nullptr) task.stop = std::min(stop, task.start + Backlog::kPiece);
    run_tape(job, task, failure, nullptr);
    if (backlog != nullptr) backlog->add(device_->mark(task.lane));
    task.start = std::exchange(task.stop, stop);
  }
}

void LanePool::move(const RoundJob& job, Task task, Failure& failure) {
  AwayStorages& away = job.tape->away();
  const MoveInstruction& move = job.tape->move_at(task.start);
  const cu::Stream stream = device_->stream(task.lane);
  const CopyOrder order = away.order_before(move, stream);
  run_tape(job, task, failure, nullptr, &order);
  if (!failure.happened.load()) away.order_after(move, stream);
}

void Backlog::add(Mark mark) {
  pieces_.push_back(std::move(mark));
  while (pieces_.size() > kPieces) {
    if (throttle_.is_behind()) device_.wait(pieces_.front());
    pieces_.pop_front();
  }
}

RoundResult LanePool::run_step(int lane, const FlowStep& step, Gate& gate,
                               const RoundResult* former) {
  Failure failure;
  RoundResult result{{}, {}, {}, {}, device_, {}};
  device_->set_first(lane, step.throttle && step.throttle->is_first());
  {
    const ThrottleScope work(step.throttle.get(), device_->queues());
    const GateScope scope(gate, lane, step.demand);
    try {
      run_admitted(lane, step, gate, former, failure, result.spans);
    } catch (...) {
      failure.note();
      drain();
      abandon(step.job, lane);
    }
    // A stand-in's host functions refer to this call.
    if (device_->calls_back()) drain();
    step.job.plan->close(*arena_);
  }
  rethrow_failure();
  result.end = device_->mark(lane);
  result.errors.push_back(failure.error);
  result.losses.push_back(step.job.tape->loss());
  result.metrics.push_back(step.job.tape->metrics());
  return result;
}

void LanePool::run_admitted(int lane, const FlowStep& step, Gate& gate, const RoundResult* former,
                            Failure& failure, std::vector<Span>& spans) {
  const std::function<bool()> awaited = [&gate, lane] { return gate.is_awaited(lane); };
  const std::function<void()> pause = [&step, &awaited] { step.throttle->pause(awaited); };
  wait_for_former(lane, former);
  run_groups(lane, step, gate, failure, spans, step.throttle ? pause : nullptr);
}

// On a device the former step may only be queued, on another lane's stream.
void LanePool::wait_for_former(int lane, const RoundResult* former) {
  if (former != nullptr && former->end.event) device_->wait_event(lane, *former->end.event);
}

void LanePool::run_groups(int lane, const FlowStep& step, Gate& gate, Failure& failure,
                          std::vector<Span>& spans, const std::function<void()>& pause) {
  const bool queues = device_->queues();
  std::optional<Backlog> backlog;
  if (queues && step.throttle) backlog.emplace(*device_, *step.throttle);
  for (std::size_t group = 0; group < step.groups.size(); ++group) {
    const auto [start, stop] = step.groups[group];
    if (pause && queues) pause();  // before it has memory that others may wait for
    if (const auto former = gate.enter(lane)) device_->wait_event(lane, *former->event);
    if (step.job.plan->uses_allocator()) arena_->synchronize();
    execute(step.job, {lane, 0, static_cast<int>(group), start, stop}, failure, spans,
            pause && !queues ? &pause : nullptr,
            backlog && step.throttle->is_behind() ? &*backlog : nullptr);
    if (pause && queues) step.throttle->owe(step.seconds.at(group));
    if (step.job.plan->uses_allocator() && device_->calls_back()) drain();
    gate.leave(lane, spans.back().stop);
    if (failure.happened.load()) return;
  }
}

void LanePool::shutdown() {
  {
    std::lock_guard lock(mutex_);
    stop_.store(true);
  }
  wake_.notify_all();
}

}  // namespace waterflow
