// The arena on a device: it decides on the host while work is still queued, as it does on a GPU.
// Lane threads queue "kernels" (host functions on their lane's stream) that stamp whole blocks and
// find the stamps again, and free a block as soon as its last kernel is queued. A block that is
// handed out too early shows as a foreign stamp; the order of the streams is all that prevents it.
//
//   stamps LIBRARY MODE SEEDS
//
// LIBRARY is the fake driver's path, or "" where it is part of the program. MODE is
//   found      the lanes ask the arena for each block
//   planned    the memory plans of a rehearsal keep the blocks
//   unordered  both once more, but the streams do not wait for each other: stamps must get lost
//   keying     a block that another lane has freed is not handed out too early
//   paper      but it is where the program is linked with Waterwave's rule of who may take it
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/arena/arena.h"
#include "core/check/checker.h"
#include "core/device/cuda_backend.h"
#include "core/device/cuda_device.h"
#include "core/plan/memory_plan.h"
#include "core/plan/rehearsal.h"

namespace {

using namespace waterflow;
using Word = std::uint64_t;

void expect(bool holds, const std::string& sentence) {
  if (!holds) throw std::runtime_error(sentence);
}

// The fake driver's controls.
class Fake {
 public:
  explicit Fake(const char* library)
      : library_(dlopen(library, RTLD_NOW)),
        set_delay(find<int(int, unsigned)>("fake_set_delay")),
        ignore_waits(find<int(int)>("fake_ignore_waits")),
        live(find<long long(const char*)>("fake_live")),
        reset(find<void()>("fake_reset")) {}

 private:
  template <typename Function>
  Function* find(const char* symbol) const {
    void* address = library_ == nullptr ? nullptr : dlsym(library_, symbol);
    expect(address != nullptr, std::string("no ") + symbol);
    return reinterpret_cast<Function*>(address);
  }

  void* library_;

 public:
  int (*set_delay)(int max_microseconds, unsigned seed);
  int (*ignore_waits)(int on);
  long long (*live)(const char* kind);
  void (*reset)();
};

// A thread's exception ends the process anyway; it should do so with its message.
template <typename Body>
std::thread spawn(Body body) {
  return std::thread([body] {
    try {
      body();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "stamps: %s\n", error.what());
      std::_Exit(1);
    }
  });
}

template <typename Body>
void on_each_lane(int lanes, Body body) {
  std::vector<std::thread> threads;
  for (Lane lane = 0; lane < lanes; ++lane) threads.push_back(spawn([=] { body(lane); }));
  for (std::thread& thread : threads) thread.join();
}

// The host threads wait for each other; the last one acts before all go on.
class Barrier {
 public:
  Barrier(int threads, std::function<void()> act) : threads_(threads), act_(std::move(act)) {}

  void arrive() {
    std::unique_lock<std::mutex> lock(mutex_);
    const int round = round_;
    if (++arrived_ < threads_) {
      passed_.wait(lock, [&] { return round_ != round; });
      return;
    }
    act_();
    arrived_ = 0;
    ++round_;
    passed_.notify_all();
  }

 private:
  const int threads_;
  const std::function<void()> act_;
  std::mutex mutex_;
  std::condition_variable passed_;
  int arrived_ = 0;
  int round_ = 0;
};

struct Block {
  Word* data = nullptr;
  std::size_t bytes = 0;
  Word stamp = 0;

  std::size_t words() const { return bytes / sizeof(Word); }
};

// A device, its streams, an arena in its memory, and what the lanes do with it.
class Machine {
 public:
  Machine(const char* library, int lanes, std::size_t capacity)
      : streams_(std::make_shared<LaneStreams>(
            std::make_shared<CudaDevice>(Driver::load(library), 0), lanes)) {
    Options options;
    options.lanes = lanes;
    arena_ = std::make_unique<Arena>(std::make_unique<CudaBackend>(streams_, capacity), options);
    arena_->commit();
    arena_->record(true);
  }

  Arena& arena() { return *arena_; }
  int lanes() const { return streams_->lanes(); }
  int lost() const { return lost_; }  // stamps that were not found again; drain() first
  void drain() { streams_->drain(); }
  void queue(Lane lane, std::function<void()> work) { streams_->launch(lane, std::move(work)); }

  Block stamped(void* pointer, std::size_t bytes, Lane lane) {
    const Block block{static_cast<Word*>(pointer), bytes, ++last_stamp_};
    queue(lane, [block] { std::fill_n(block.data, block.words(), block.stamp); });
    return block;
  }

  void find_stamp(const Block& block, Lane lane) {
    queue(lane, [this, block] {
      const bool intact = std::all_of(block.data, block.data + block.words(),
                                      [&](Word word) { return word == block.stamp; });
      if (!intact) ++lost_;
    });
  }

  void finish() {
    drain();
    expect(arena_->statistics().live == 0, "memory leaked");
    arena_->snapshot().check_consistency();
    const auto violations = check_happens_before(arena_->take_log(), lanes());
    expect(violations.empty(), violations.empty() ? "" : violations.front().message);
  }

 private:
  std::shared_ptr<LaneStreams> streams_;
  std::unique_ptr<Arena> arena_;
  std::atomic<Word> last_stamp_{0};
  std::atomic<int> lost_{0};
};

// Blocks by request. Between barriers a lane keeps to blocks that are its own or were handed to it
// at the last barrier; those of several lanes are freed by whoever uses them last.
class Found {
 public:
  Found(Machine& machine, unsigned seed)
      : machine_(machine),
        seed_(seed),
        inboxes_(machine.lanes()),
        barrier_(machine.lanes(), [this] { hand_on(); }) {}

  void run(int phases, int operations) {
    on_each_lane(machine_.lanes(), [=](Lane lane) { work(lane, phases, operations); });
  }

 private:
  struct Shared {
    Block block;
    std::atomic<int> users;
  };
  struct Parcel {
    std::shared_ptr<Shared> shared;
    LaneMask lanes;
  };

  void work(Lane lane, int phases, int operations) {
    std::mt19937 random(seed_ * 64 + lane);
    std::vector<Block> own;
    for (int phase = 0; phase < phases; ++phase) {
      for (const auto& shared : inboxes_[lane]) use(*shared, lane);
      for (int at = 0; at < operations; ++at) act(lane, random, own);
      while (own.size() > 2) give(random, own);
      barrier_.arrive();
    }
    for (const auto& shared : inboxes_[lane]) use(*shared, lane);
    while (!own.empty()) release(lane, random, own);
  }

  void act(Lane lane, std::mt19937& random, std::vector<Block>& own) {
    const unsigned choice = random() % 10;
    if (choice < 4 || own.empty()) {
      take(lane, random, own);
    } else if (choice < 6) {
      machine_.find_stamp(own[random() % own.size()], lane);
    } else {
      release(lane, random, own);
    }
  }

  void take(Lane lane, std::mt19937& random, std::vector<Block>& own) {
    const std::size_t bytes = 64 + random() % 6000 / 8 * 8;
    void* pointer = machine_.arena().allocate(bytes, lane, lane);
    if (pointer != nullptr) {
      own.push_back(machine_.stamped(pointer, bytes, lane));
    } else if (!own.empty()) {
      release(lane, random, own);
    }
  }

  void release(Lane lane, std::mt19937& random, std::vector<Block>& own) {
    const Block block = pick(random, own);
    machine_.find_stamp(block, lane);
    machine_.arena().free(block.data, lane);
  }

  // For one lane or several, perhaps the giving one too, from the next barrier on.
  void give(std::mt19937& random, std::vector<Block>& own) {
    auto shared = std::make_shared<Shared>();
    shared->block = pick(random, own);
    const LaneMask every = (LaneMask{1} << machine_.lanes()) - 1;
    const LaneMask lanes = 1 + random() % every;
    shared->users = 0;
    for (Lane lane = 0; lane < machine_.lanes(); ++lane) {
      if (lanes & mask_of(lane)) ++shared->users;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    outbox_.push_back({std::move(shared), lanes});
  }

  void hand_on() {
    machine_.arena().synchronize();
    for (Lane lane = 0; lane < machine_.lanes(); ++lane) {
      inboxes_[lane].clear();
      for (const Parcel& parcel : outbox_) {
        if (parcel.lanes & mask_of(lane)) inboxes_[lane].push_back(parcel.shared);
      }
    }
    outbox_.clear();
  }

  // The arena hears of a use when it is queued: not before, as a sync between the two would count
  // the use as done.
  void use(Shared& shared, Lane lane) {
    machine_.find_stamp(shared.block, lane);
    machine_.arena().use(shared.block.data, lane);
    if (shared.users.fetch_sub(1) == 1) machine_.arena().free(shared.block.data, lane);
  }

  static Block pick(std::mt19937& random, std::vector<Block>& own) {
    std::swap(own[random() % own.size()], own.back());
    const Block block = own.back();
    own.pop_back();
    return block;
  }

  Machine& machine_;
  const unsigned seed_;
  std::mutex mutex_;
  std::vector<Parcel> outbox_;
  std::vector<std::vector<std::shared_ptr<Shared>>> inboxes_;  // by lane
  Barrier barrier_;
};

// What a step does that its profile does not have.
enum class Change { kNone, kMoreRequests, kLateFrees };

struct Step {
  StepEvents profile;
  std::vector<std::int32_t> instructions;  // of each event
  std::vector<std::size_t> offsets;
  std::vector<Block> held;  // by id
  std::size_t next = 0;     // event
};

// Rehearsed rounds, carried out again and again by lanes that run ahead of their streams.
class Planned {
 public:
  Planned(Machine& machine, unsigned seed, Change change)
      : machine_(machine),
        random_(seed),
        change_(change),
        barrier_(machine.lanes(), [this] { machine_.arena().synchronize(); }) {
    for (int number = 0; number < kSteps; ++number) make_step();
    for (int group = 0; group < kGroups; ++group) {
      std::vector<Slot> pair;
      for (int step = 0; step < kSteps; ++step) {
        pair.push_back({(step + group) % machine.lanes(), step, group});
      }
      pairs_.push_back(pair);
    }
    plan();
  }

  void run(int rounds) {
    for (int round = 0; round < rounds; ++round) {
      begin();
      on_each_lane(machine_.lanes(), [this](Lane lane) { work(lane); });
      for (auto& plan : plans_) plan->close(machine_.arena());
      release_what_is_left();
    }
  }

  std::size_t deviations() const {
    std::size_t sum = 0;
    for (const auto& plan : plans_) sum += plan->deviations();
    return sum;
  }

 private:
  static constexpr int kSteps = 3;
  static constexpr int kGroups = 5;
  static constexpr int kInstructions = 3;  // of a group
  static constexpr int kExtra = 1000;      // ids from here on are not in the profile

  void make_step() {
    Step step;
    std::vector<StepEvent> held;
    for (int instruction = 0; instruction < kGroups * kInstructions; ++instruction) {
      for (int at = 0; at < 4; ++at) {
        const bool frees = !held.empty() && random_() % 2 == 0;
        if (frees) {
          std::swap(held[random_() % held.size()], held.back());
          step.profile.events.push_back({-held.back().bytes, held.back().id});
          held.pop_back();
        } else {
          held.push_back({512 * (1 + static_cast<int>(random_() % 8)), instruction * 10 + at});
          step.profile.events.push_back(held.back());
        }
        step.instructions.push_back(instruction);
      }
      if (instruction % kInstructions == kInstructions - 1) {
        step.profile.group_ends.push_back(static_cast<int>(step.profile.events.size()));
      }
    }
    step.held.resize(kExtra + kGroups * kInstructions);
    steps_.push_back(std::move(step));
  }

  void plan() {
    std::vector<StepEvents> profiles;
    for (const Step& step : steps_) profiles.push_back(step.profile);
    const auto result = rehearse(machine_.arena().snapshot(), profiles, {0, 1, 2}, pairs_);
    expect(result.fits, result.why);
    extent_ = result.extent;
    for (int number = 0; number < kSteps; ++number) {
      const Step& step = steps_[number];
      plans_.push_back(std::make_unique<MemoryPlan>(step.profile.events, step.instructions,
                                                    kGroups * kInstructions, result.offsets[number],
                                                    machine_.arena().version()));
    }
  }

  void begin() {
    machine_.arena().synchronize();
    const std::size_t capacity = machine_.arena().statistics().capacity;
    auto shared = std::make_shared<RoundMemory>(extent_, capacity);
    for (int number = 0; number < kSteps; ++number) {
      plans_[number]->begin(machine_.arena(), number, shared, /*keep_blocks=*/true, number);
      steps_[number].next = 0;
    }
    seed_ = random_();
  }

  void work(Lane lane) {
    std::mt19937 random(seed_ + static_cast<unsigned>(lane));
    for (const auto& pair : pairs_) {
      for (const Slot& slot : pair) {
        if (slot.lane == lane) play(slot, random);
      }
      barrier_.arrive();
    }
  }

  void play(const Slot& slot, std::mt19937& random) {
    Step& step = steps_[slot.step];
    MemoryPlan& plan = *plans_[slot.step];
    for (int at = 0; at < kInstructions; ++at) {
      const int instruction = slot.group * kInstructions + at;
      plan.begin_instruction(instruction);
      if (change_ == Change::kMoreRequests && random() % 8 == 0) {
        take(slot, extra_bytes(step, random), kExtra + instruction);
      }
      while (step.next < step.instructions.size() && step.instructions[step.next] == instruction) {
        play(slot, step.profile.events[step.next++], random);
      }
      plan.end_instruction(machine_.arena(), slot.lane);
    }
  }

  // Often what the next request asks for, so that it looks like that one.
  std::size_t extra_bytes(const Step& step, std::mt19937& random) const {
    const bool more = step.next < step.profile.events.size();
    const std::int64_t next = more ? step.profile.events[step.next].bytes : 0;
    return next > 0 && random() % 2 == 0 ? next : 512 * (1 + random() % 8);
  }

  void play(const Slot& slot, const StepEvent& event, std::mt19937& random) {
    if (event.bytes > 0) {
      take(slot, event.bytes, event.id);
    } else if (change_ != Change::kLateFrees || random() % 16 > 0) {
      release(slot.step, event.id, slot.lane);
    }  // else it lives until the round is over
  }

  void take(const Slot& slot, std::size_t bytes, int id) {
    void* pointer = plans_[slot.step]->take(machine_.arena(), bytes, slot.lane);
    expect(pointer != nullptr, "no room above the plan");
    steps_[slot.step].held[id] = machine_.stamped(pointer, bytes, slot.lane);
  }

  void release(int number, int id, Lane lane) {
    Block& block = steps_[number].held[id];
    machine_.find_stamp(block, lane);
    if (!plans_[number]->release(machine_.arena(), block.data)) {
      machine_.arena().free(block.data, lane);
    }
    block = {};
  }

  void release_what_is_left() {
    for (int number = 0; number < kSteps; ++number) {
      for (std::size_t id = 0; id < steps_[number].held.size(); ++id) {
        if (steps_[number].held[id].data != nullptr) release(number, static_cast<int>(id), 0);
      }
    }
  }

  Machine& machine_;
  std::mt19937 random_;
  const Change change_;
  std::vector<Step> steps_;
  std::vector<std::vector<Slot>> pairs_;
  std::vector<std::unique_ptr<MemoryPlan>> plans_;
  std::size_t extent_ = 0;
  unsigned seed_ = 0;
  Barrier barrier_;
};

constexpr std::size_t kRoomy = std::size_t{1} << 20;
constexpr std::size_t kTight = std::size_t{48} << 10;

// The number of stamps that got lost.
int run_found(const char* library, unsigned seed) {
  const bool tight = seed % 2 == 0;
  Machine machine(library, 2 + seed / 2 % 2, tight ? kTight : kRoomy);
  Found(machine, seed).run(/*phases=*/6, /*operations=*/60);
  machine.finish();
  expect(!tight || machine.arena().statistics().forced_syncs > 0, "the arena was never full");
  return machine.lost();
}

int run_planned(const char* library, unsigned seed) {
  const auto change = static_cast<Change>(seed % 3);
  Machine machine(library, 2 + seed / 3 % 2, kRoomy);
  Planned planned(machine, seed, change);
  planned.run(/*rounds=*/4);
  machine.finish();
  expect((planned.deviations() > 0) == (change != Change::kNone), "places not as they should be");
  return machine.lost();
}

// Lane 0 makes a block; lane 1, late, reads and frees it; lane 0 asks for one of that size.
int run_keying(const char* library) {
  Machine machine(library, 2, std::size_t{2} << 20);
  Arena& arena = machine.arena();
  const std::size_t bytes = arena.statistics().capacity;
  std::atomic<bool> overwritten{false};
  const Block first = machine.stamped(arena.allocate(bytes, 0, 0), bytes, 0);
  arena.synchronize();
  machine.queue(1, [&] {
    for (int waited = 0; !overwritten && waited < 100; ++waited) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  machine.find_stamp(first, 1);
  arena.use(first.data, 1);
  arena.free(first.data, 1);
  const Block second = machine.stamped(arena.allocate(bytes, 0, 0), bytes, 0);
  expect(second.data == first.data, "another block");
  machine.queue(0, [&] { overwritten = true; });
  machine.drain();
  const bool is_safe = check_happens_before(arena.take_log(), 2).empty();
  expect(is_safe == (machine.lost() == 0), "the checker and the stamps disagree");
  return machine.lost();
}

int run(const char* library, const std::string& mode, int seeds) {
  const Fake fake(library);
  int lost = 0;
  for (int seed = 0; seed < seeds; ++seed) {
    fake.set_delay(100, seed);
    fake.ignore_waits(mode == "unordered");
    if (mode != "planned") lost += run_found(library, seed);
    if (mode != "found") lost += run_planned(library, seed);
    fake.reset();
    expect(fake.live("memory_bytes") == 0 && fake.live("streams") == 0, "the device has leaked");
  }
  return lost;
}

}  // namespace

int main(int count, char** arguments) {
  try {
    expect(count == 4, "usage: stamps LIBRARY MODE SEEDS");
    const char* library = arguments[1];
    const std::string mode = arguments[2];
    if (mode == "keying") {
      expect(run_keying(library) == 0, "our keying lost a stamp");
    } else if (mode == "paper") {
      expect(run_keying(library) == 1, "Waterwave's keying lost none");
    } else {
      const int lost = run(library, mode, std::atoi(arguments[3]));
      expect((lost > 0) == (mode == "unordered"), std::to_string(lost) + " stamps were lost");
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "stamps: %s\n", error.what());
    return 1;
  }
  std::puts("stamps: ok");
}
