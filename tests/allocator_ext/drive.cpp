#include "drive.h"

#include <random>
#include <utility>
#include <vector>

#include "core/arena/allocator.h"
#include "core/check/checker.h"

namespace waterflow {
namespace {

constexpr std::size_t kCapacity = std::size_t{1} << 24;
constexpr JobId kJobs = 4;
constexpr std::uint64_t kOperationsPerCheck = 2048;

class Driver {
 public:
  Driver(std::uint64_t seed, int lanes)
      : random_(seed), allocator_(Options{kCapacity, 64, lanes}), checker_(lanes) {
    allocator_.record(true);
  }

  DriveReport run(std::uint64_t operations) {
    for (; report_.operations < operations; ++report_.operations) {
      act();
      if (report_.operations % kOperationsPerCheck == 0) judge();
    }
    while (!live_.empty()) free();
    allocator_.synchronize();
    judge();
    if (allocator_.chunks().size() != 1 || allocator_.live() != 0) {
      throw Inconsistent("after the last free and sync the arena is not one free chunk");
    }
    report_.syncs = allocator_.syncs();
    report_.violations = checker_.violations().size();
    if (report_.violations > 0) report_.first_violation = checker_.violations().front().message;
    return report_;
  }

 private:
  std::size_t below(std::size_t bound) { return random_() % bound; }
  JobId any_job() { return static_cast<JobId>(below(kJobs)); }
  std::size_t any_live() { return live_[below(live_.size())]; }

  // Now and then a thread that is no lane, such as a garbage collector's.
  Lane any_lane() {
    return below(64) == 0 ? kNoLane : static_cast<Lane>(below(allocator_.lanes()));
  }

  // Uniform in the logarithm up to a 16th of the arena, and often a repeated size.
  std::size_t any_bytes() {
    if (below(2) == 0) return std::size_t{640} << below(8);
    return 1 + below(std::size_t{2} << below(20));
  }

  void act() {
    const std::size_t dice = below(1000);
    // Growth and decline take turns, so that the run meets a full arena and an empty one.
    const bool growing = report_.operations / 1500 % 2 == 0;
    if (dice < (growing ? 500u : 300u)) return allocate();
    if (dice < (growing ? 700u : 750u)) return live_.empty() ? allocate() : free();
    if (dice < 880) return live_.empty() ? allocate() : use();
    if (dice < 970) return allocate_at();
    if (dice < 990) return allocator_.synchronize();
    if (dice < 995) return resize();
    allocator_.set_limit(any_job(), below(2) == 0 ? kNoLimit : below(kCapacity / 2));
  }

  void allocate() {
    const bool may_sync = below(8) == 0;
    const auto offset = allocator_.allocate(any_bytes(), any_lane(), any_job(), may_sync);
    count(offset.has_value(), report_.allocations);
    if (offset) live_.push_back(*offset);
  }

  void allocate_at() {
    const std::size_t offset = below(allocator_.capacity() / 64) * 64;
    const bool placed = allocator_.allocate_at(offset, any_bytes(), any_lane(), any_job());
    count(placed, report_.planned);
    if (placed) live_.push_back(offset);
  }

  void count(bool placed, std::uint64_t& counter) { ++(placed ? counter : report_.refused); }

  void use() {
    allocator_.use(any_live(), any_lane());
    ++report_.uses;
  }

  void free() {
    std::swap(live_[below(live_.size())], live_.back());
    allocator_.free(live_.back(), any_lane());
    live_.pop_back();
    ++report_.frees;
  }

  void resize() {
    if (allocator_.resize(kCapacity / 2 + below(kCapacity))) ++report_.resizes;
  }

  void judge() {
    allocator_.check_consistency();
    for (const Event& event : allocator_.take_log()) checker_.add(event);
    ++report_.consistency_checks;
  }

  std::mt19937_64 random_;
  Allocator allocator_;
  HappensBefore checker_;
  std::vector<std::size_t> live_;
  DriveReport report_;
};

}  // namespace

DriveReport drive(std::uint64_t seed, std::uint64_t operations, int lanes) {
  return Driver(seed, lanes).run(operations);
}

}  // namespace waterflow
