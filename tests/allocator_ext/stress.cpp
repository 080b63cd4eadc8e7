// Threads as lanes over one arena, for the sanitizers: every chunk is filled with its own pattern
// and verified before its free, so memory that two owners share shows as a wrong byte, and a
// missing lock as a data race.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/arena/arena.h"
#include "core/arena/live_bytes.h"
#include "core/check/checker.h"
#include "core/device/arenas.h"
#include "core/plan/alternation.h"
#include "core/plan/gate.h"
#include "core/plan/rehearsal.h"
#include "core/plan/signal.h"
#include "core/plan/throttle.h"
#include "drive.h"

namespace {

using namespace waterflow;

struct Held {
  unsigned char* data;
  std::size_t bytes;
  unsigned char pattern;
};

void expect(bool holds, const std::string& sentence) {
  if (!holds) throw std::runtime_error(sentence);
}

Held filled(void* pointer, std::size_t bytes, std::size_t pattern) {
  const Held held{static_cast<unsigned char*>(pointer), bytes, static_cast<unsigned char>(pattern)};
  std::memset(held.data, held.pattern, bytes);
  return held;
}

void verify(const Held& held) {
  const bool intact = std::all_of(held.data, held.data + held.bytes,
                                  [&](unsigned char byte) { return byte == held.pattern; });
  expect(intact, "a live chunk was overwritten");
}

// A thread's exception ends the process anyway; it should do so with its message.
template <typename Body>
std::thread spawn(Body body) {
  return std::thread([body] {
    try {
      body();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "stress: %s\n", error.what());
      std::_Exit(1);
    }
  });
}

// Chunks travel between the lanes: allocated on one, verified and freed on any.
class Exchange {
 public:
  explicit Exchange(int lanes) : arena_(host_arena(std::size_t{1} << 20, lanes)), lanes_(lanes) {}

  void run(int operations) {
    arena_->record(true);
    std::vector<std::thread> threads;
    for (Lane lane = 0; lane < lanes_; ++lane) {
      threads.push_back(spawn([=] { work(lane, operations); }));
    }
    threads.push_back(spawn([=] { watch(operations); }));
    for (std::thread& thread : threads) thread.join();
    for (const Held& held : shared_) arena_->free(held.data, kNoLane);
    arena_->synchronize();
    arena_->snapshot().check_consistency();
    expect(arena_->statistics().largest_free == arena_->statistics().capacity, "memory leaked");
    const auto violations = check_happens_before(arena_->take_log(), lanes_);
    expect(violations.empty(), violations.empty() ? "" : violations.front().message);
  }

 private:
  void work(Lane lane, int operations) {
    std::mt19937 random(lane);
    for (int at = 0; at < operations; ++at) {
      if (random() % 2 == 0) {
        give(lane, 1 + random() % 20'000, random());
      } else {
        take(lane, random());
      }
      if (random() % 50 == 0) arena_->synchronize();
    }
  }

  void give(Lane lane, std::size_t bytes, std::size_t pattern) {
    void* pointer = arena_->allocate(bytes, lane, lane);
    if (pointer == nullptr) return;
    expect(arena_->owns(pointer), "the arena disowns its chunk");
    const Held held = filled(pointer, bytes, pattern);
    std::lock_guard<std::mutex> lock(mutex_);
    shared_.push_back(held);
  }

  void take(Lane lane, std::size_t pick) {
    Held held;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (shared_.empty()) return;
      std::swap(shared_[pick % shared_.size()], shared_.back());
      held = shared_.back();
      shared_.pop_back();
    }
    arena_->use(held.data, lane);
    verify(held);
    arena_->free(held.data, lane);
  }

  void watch(int operations) {
    for (int at = 0; at < operations / 20; ++at) {
      arena_->snapshot().check_consistency();
      expect(arena_->statistics().live <= arena_->statistics().capacity, "over the budget");
      expect(!arena_->owns(this), "the arena owns what is not its own");
      arena_->timeline();
      arena_->set_limit(0, at % 2 == 0 ? kNoLimit : std::size_t{1} << 18);
    }
  }

  std::shared_ptr<Arena> arena_;
  int lanes_;
  std::mutex mutex_;
  std::vector<Held> shared_;
};

// Parts that grow at the same time, and shrink when all have: the sum that is reached is the most
// that there was in between, whoever came to it last.
class PeakRun {
 public:
  explicit PeakRun(int parts) : parts_(parts), most_(parts), held_(parts) {}

  void run(int rounds) {
    for (int part = 0; part < parts_; ++part) most_[part] = 100'000 * (part + 1);
    std::vector<std::thread> threads;
    for (int part = 0; part < parts_; ++part) {
      threads.push_back(spawn([=] { play(part, rounds); }));
    }
    for (std::thread& thread : threads) thread.join();
    expect(bytes_.planned() == 0, "what was let go of is counted");
  }

 private:
  // The first part is the allocator's.
  void play(int part, int rounds) {
    std::mt19937 random(part);
    if (part > 0) bytes_.expect(part, static_cast<std::ptrdiff_t>(most_[part]));
    std::size_t& held = held_[part];
    for (int round = 0; round < rounds; ++round) {
      meet();
      for (std::size_t left = random() % most_[part], step; left > 0; left -= step) {
        step = std::min<std::size_t>(left, 1 + random() % 30'000);
        hold(part, held + step);
      }
      meet();
      if (part == 0) check();
      meet();
      hold(part, 0);
    }
    if (part > 0) bytes_.expect(part, -static_cast<std::ptrdiff_t>(most_[part]));
  }

  void hold(int part, std::size_t bytes) {
    const auto change = static_cast<std::ptrdiff_t>(bytes - held_[part]);
    held_[part] = bytes;
    if (part == 0) return bytes_.set_fixed(bytes);
    if (change != 0) bytes_.add(part, change);
  }

  void check() {
    std::size_t sum = 0;
    for (const std::size_t held : held_) sum += held;
    peak_ = std::max(peak_, sum);
    expect(bytes_.peak() == peak_, "the peak is not the most that was held");
    if (++checks_ % 50 == 0) {
      bytes_.reset_peak();
      peak_ = sum;
    }
  }

  // All threads come here before one goes on.
  void meet() {
    const int round = meetings_.load();
    if (here_.fetch_add(1) + 1 == parts_) {
      here_ = 0;
      meetings_ = round + 1;
    }
    while (meetings_.load() == round) std::this_thread::yield();
  }

  const int parts_;
  LiveBytes bytes_;
  std::vector<std::size_t> most_;
  std::vector<std::size_t> held_;  // by part; read by others where all meet
  std::size_t peak_ = 0;
  int checks_ = 0;
  std::atomic<int> here_{0}, meetings_{0};
};

StepEvents random_step(std::mt19937& random, int groups) {
  StepEvents step;
  std::vector<StepEvent> held;
  for (int group = 0; group < groups; ++group) {
    for (int at = 0; at < 20; ++at) {
      const bool frees = !held.empty() && random() % (group < groups / 2 ? 4 : 2) == 0;
      if (frees) {
        std::swap(held[random() % held.size()], held.back());
        step.events.push_back({-held.back().bytes, held.back().id});
        held.pop_back();
      } else {
        held.push_back({static_cast<int>(1 + random() % 5000), group * 100 + at});
        step.events.push_back(held.back());
      }
    }
    step.group_ends.push_back(static_cast<std::int32_t>(step.events.size()));
  }
  return step;
}

// A rehearsed plan, carried out by one thread a lane with no order between them within a pair.
class PlannedRun {
 public:
  explicit PlannedRun(unsigned seed) : random_(seed) {
    for (int step = 0; step < kSteps; ++step) steps_.push_back(random_step(random_, kGroups));
    for (int at = 0; at < kGroups; ++at) {
      std::vector<Slot> pair;
      for (int step = 0; step < kSteps; ++step) pair.push_back({(step + at) % kSteps, step, at});
      pairs_.push_back(pair);
    }
    held_.resize(kSteps);
    next_event_.resize(kSteps);
    next_offset_.resize(kSteps);
  }

  void run() {
    plan_ = rehearse(arena_->snapshot(), steps_, {0, 1, 2}, pairs_);
    expect(plan_.fits, plan_.why);
    arena_->record(true);
    for (const std::vector<Slot>& pair : pairs_) {
      arena_->synchronize();
      std::vector<std::thread> lanes;
      for (const Slot& slot : pair) lanes.push_back(spawn([=] { play(slot); }));
      for (std::thread& lane : lanes) lane.join();
    }
    expect(arena_->statistics().peak <= plan_.peak, "above the planned peak");
    expect(arena_->statistics().extent == plan_.extent, "not the planned extent");
    expect(check_happens_before(arena_->take_log(), kSteps).empty(), "the plan races");
  }

 private:
  static constexpr int kSteps = 3;
  static constexpr int kGroups = 6;

  void play(const Slot& slot) {
    const StepEvents& step = steps_[slot.step];
    std::vector<Held>& held = held_[slot.step];
    std::size_t& at = next_event_[slot.step];
    for (; at < static_cast<std::size_t>(step.group_ends[slot.group]); ++at) {
      const StepEvent& event = step.events[at];
      held.resize(std::max<std::size_t>(held.size(), event.id + 1));
      if (event.bytes < 0) {
        verify(held[event.id]);
        arena_->free(held[event.id].data, slot.lane);
        continue;
      }
      const std::size_t offset = plan_.offsets[slot.step][next_offset_[slot.step]++];
      void* pointer = arena_->allocate_at(offset, event.bytes, slot.lane, slot.step);
      expect(pointer != nullptr, "a planned place is taken");
      held[event.id] = filled(pointer, event.bytes, 31 * event.id + slot.step);
    }
  }

  std::mt19937 random_;
  std::shared_ptr<Arena> arena_ = host_arena(std::size_t{8} << 20, kSteps);
  std::vector<StepEvents> steps_;
  std::vector<std::vector<Slot>> pairs_;
  RehearsalResult plan_;
  std::vector<std::vector<Held>> held_;
  std::vector<std::size_t> next_event_;
  std::vector<std::size_t> next_offset_;
};

constexpr std::size_t kRange = 1000;  // of a gate

std::shared_ptr<const Demand> random_demand(std::mt19937& random) {
  std::vector<std::size_t> during, after{0};
  const int groups = 1 + random() % 12;
  for (int group = 1; group <= groups; ++group) {
    after.push_back(group == groups ? 0 : random() % kRange);
    const std::size_t least = std::max(after[group - 1], after[group]);
    during.push_back(least + random() % (kRange + 1 - least));
  }
  return std::make_shared<const Demand>(during, after);
}

// Threads as lanes push random steps through a gate. Each group writes all that it may reach and
// finds it unchanged: bytes that neighbours hold together show as a wrong value or a data race.
class GateRun {
 public:
  explicit GateRun(int lanes) : gate_(kRange, lanes), held_(lanes), ranges_((lanes + 1) / 2) {
    for (auto& range : ranges_) range.resize(kRange);
  }

  void run(int steps) {
    std::vector<std::thread> threads;
    for (Lane lane = 0; lane < static_cast<Lane>(held_.size()); ++lane) {
      threads.push_back(spawn([=] { work(lane, steps); }));
    }
    for (std::thread& thread : threads) thread.join();
    expect(finished_ == steps * static_cast<int>(held_.size()), "a step has not finished");
    expect(gate_.waits() > 0 || held_.size() == 1, "nobody ever had to wait");
  }

 private:
  void work(Lane lane, int steps) {
    std::mt19937 random(lane);
    std::vector<std::shared_ptr<const Demand>> demands;  // the same step comes again and again
    for (int at = 0; at < 5; ++at) demands.push_back(random_demand(random));
    ++started_;
    while (started_ < static_cast<int>(held_.size())) std::this_thread::yield();
    for (int step = 0; step < steps; ++step) {
      const auto& demand = demands[random() % demands.size()];
      const bool fails = random() % 10 == 0;
      const std::size_t stop = fails ? random() % demand->groups() : demand->groups();
      gate_.begin(lane, demand);
      for (std::size_t group = 0; group < stop; ++group) run_group(lane, *demand, group);
      if (fails) gate_.enter(lane);  // fails within a group, which it never leaves
      hold(lane, 0);
      gate_.end(lane);
      ++finished_;
    }
  }

  void run_group(Lane lane, const Demand& demand, std::size_t group) {
    gate_.enter(lane);
    hold(lane, demand.during[group]);
    unsigned char* data = ranges_[lane / 2].data();
    if (lane % 2 == 1) data += kRange - demand.during[group];
    const Held own = filled(data, demand.during[group], 7 * group + lane);
    std::this_thread::yield();
    verify(own);
    hold(lane, demand.after[group + 1]);
    gate_.leave(lane, Mark{});
  }

  void hold(Lane lane, std::size_t bytes) {
    held_[lane] = bytes;
    const std::size_t other = static_cast<std::size_t>(lane) ^ 1;
    const std::size_t theirs = other < held_.size() ? held_[other].load() : 0;
    expect(bytes + theirs <= kRange, "neighbours hold more than their range");
  }

  Gate gate_;
  std::vector<std::atomic<std::size_t>> held_;
  std::vector<std::vector<unsigned char>> ranges_;
  std::atomic<int> started_{0}, finished_{0};
};

// On a device a group must wait for the last one of the neighbour that reached into its place, in
// whatever step that was. The marks here are numbers only.
void marks_of_neighbours() {
  const auto event = std::make_shared<DeviceEvent>();
  std::mt19937 random(5);
  Gate gate(kRange, 2);
  std::vector<std::pair<std::size_t, double>> done[2];  // reach and mark of every group so far
  double now = 0;
  for (int step = 0; step < 400; ++step) {
    const Lane lane = static_cast<Lane>(random() % 2);
    const auto demand = random_demand(random);
    gate.begin(lane, demand);
    for (std::size_t mine : demand->during) {
      double expected = 0;
      for (const auto& [reach, mark] : done[1 - lane]) {
        if (reach + mine > kRange) expected = mark;
      }
      const std::optional<Mark> found = gate.enter(lane);
      expect((found ? found->seconds : 0) == expected, "waits for another group than it must");
      gate.leave(lane, Mark{++now, event});
      done[lane].emplace_back(mine, now);
    }
    gate.end(lane);
  }
}

void random_runs() {
  for (int lanes : {1, 2, 5}) {
    const DriveReport report = drive(lanes, 20'000, lanes);
    expect(report.violations == 0, report.first_violation);
  }
}

void resizing() {
  const auto arena = host_arena(std::size_t{1} << 20, 2);
  filled(arena->pointer_to(0), std::size_t{1} << 20, 7);
  expect(arena->resize(std::size_t{1} << 18), "an empty arena did not shrink");
  expect(!arena->owns(arena->pointer_to(std::size_t{1} << 18)), "owns what it gave back");
  expect(arena->allocate(std::size_t{1} << 19, 0, 0) == nullptr, "more than the capacity");
}

// A job that goes first is compared with itself alone, one that is held back works beside it, and a
// third thread changes the duty and breaks comparisons off. Who rests is always woken.
void precedence() {
  const auto precedence = std::make_shared<Precedence>();
  const auto signal = std::make_shared<Signal>();
  Throttle first(precedence, signal), other(precedence, signal);
  first.set_first(true);
  std::atomic<bool> over{false};
  std::thread leading = spawn([&] {
    for (int stretch = 0; stretch < 300; ++stretch) {
      precedence->enter();
      for (int step = 0; step < 20; ++step) {
        first.begin();
        first.pause([] { return false; });
        first.end();
        first.step_done(step == 0);
      }
      precedence->leave();
    }
    over.store(true);
  });
  std::thread following = spawn([&] {
    while (!over.load()) {
      if (!other.may_begin()) continue;
      other.begin();
      for (int piece = 0; piece < 10; ++piece) other.pause([] { return false; });
      other.end();
    }
  });
  std::mt19937 random(3);
  while (!over.load()) {
    const auto comparison = std::make_shared<Alternation>(precedence, 0.01, 0.01);
    first.compare(comparison);
    comparison->begin();
    for (int look = 0; look < 50 && !comparison->harm() && !over.load(); ++look) {
      other.set_duty(static_cast<double>(random() % 3) / 2);
      precedence->disturb(static_cast<int>(random() % 2));
      std::this_thread::yield();
    }
    comparison->stop();
    first.compare(nullptr);
    expect(!precedence->holds(), "others are held for a comparison that is over");
  }
  leading.join();
  following.join();
}

}  // namespace

int main() {
  try {
    random_runs();
    for (int parts : {2, 3}) PeakRun(parts).run(3'000);
    resizing();
    for (int lanes : {1, 2, 4}) Exchange(lanes).run(2'000);
    for (unsigned seed = 0; seed < 10; ++seed) PlannedRun(seed).run();
    for (int lanes : {1, 2, 3, 4}) GateRun(lanes).run(500);
    marks_of_neighbours();
    precedence();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "stress: %s\n", error.what());
    return 1;
  }
  std::puts("stress: ok");
}
