// An independent judge of an allocator's run: does every reuse of memory happen after all earlier
// uses of it? Vector clocks over the event log; it knows nothing of how the allocator decides.
//
// Each lane runs in order and ticks its own clock at every alloc, use and free; a sync joins the
// clocks of all. A thread that is no lane is ordered with nothing, itself included, until a sync.
// A copier, which copies blocks from and to a slower tier beside the lanes, runs in order, too; a
// sync is no concern of its. It must be behind all that was done to its block, and whatever is done
// to the block afterwards, its free included, must be behind the copy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/arena/types.h"

namespace waterflow {

struct Violation {
  std::size_t index;  // of the event in the log
  Lane lane;
  std::size_t offset;
  std::string message;
};

class HappensBefore {
 public:
  explicit HappensBefore(int lanes);

  void add(const Event& event);
  // The first thousand; one wrong event can bring many after it.
  const std::vector<Violation>& violations() const { return violations_; }

 private:
  struct Access {
    Lane lane;
    std::uint64_t clock;
    std::size_t index;
  };
  struct Range {
    std::size_t end;
    bool live;
    bool is_whole;                 // no part of the occupant's range was taken by another
    std::vector<Access> accesses;  // of the last occupant: its allocation, then the last per lane
  };
  using Ranges = std::map<std::size_t, Range>;

  std::size_t slot(Lane lane) const;
  void learn(Lane lane);
  Access tick(Lane lane);
  bool is_ordered(const Access& earlier, Lane lane) const;
  void join();
  void mark(const Event& event);
  void copy(const Event& event);
  void join_copier(const Event& event);
  static void raise(std::vector<std::uint64_t>& clock, const std::vector<std::uint64_t>& to);
  void allocate(const Event& event);
  void touch(const Event& event);
  Ranges::iterator split_at(std::size_t offset);
  void report(const Event& event, const std::string& what);

  std::size_t lanes_;
  std::map<Lane, std::size_t> copiers_;                        // the slot of each
  std::map<std::uint64_t, std::vector<std::uint64_t>> marks_;  // what lanes knew then, by number
  std::vector<std::uint64_t> ticks_;                           // by slot: lanes, no lane, copiers
  std::vector<std::vector<std::uint64_t>> clocks_;  // clocks_[a][b]: what slot a knows of slot b
  Ranges ranges_;                                   // by offset, never overlapping
  std::size_t index_ = 0;
  std::vector<Violation> violations_;
};

std::vector<Violation> check_happens_before(const std::vector<Event>& log, int lanes);

}  // namespace waterflow
