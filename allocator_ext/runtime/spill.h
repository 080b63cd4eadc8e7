// Storages of a step that are away in a slower tier for a while.
//
// All tensors over a storage go and come back with it: only the pointer inside the storage is
// exchanged, so views stay what they are. While a storage is away its pointer is that of its home,
// a planned place in the tier, or, of a persistent tensor, the user's own memory. Each move has two
// ends, each an instruction of the tape with its place in the plan:
//
//     leave .. gone    the copy is under way; the storage may be read, its block is still taken
//     gone  .. fetch   the storage has no block
//     fetch .. back    a new block is taken, the copy is under way; nobody reads the storage
//
// On a device the lane's work is only queued. There each end has a half in the lane's order, which
// takes and gives up blocks (`move`), and a half that speaks to the driver on the thread that
// queues
// (`order_before`, `order_after`), so that the host waits for no copy. A tape that runs by itself,
// on scratch memory, has nobody to do the second half; its copies are done at once.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/arena/arena.h"
#include "core/device/device_tier.h"
#include "core/device/tier.h"

namespace waterflow {

enum class MoveEnd { kLeave, kGone, kFetch, kBack };

// One end of a move.
struct MoveInstruction {
  MoveEnd end = MoveEnd::kLeave;
  int value = -1;        // its number among the values that move
  int slot = -1;         // kLeave: a slot with a tensor over the storage
  std::size_t home = 0;  // kLeave: offset in the tier
  bool copies = true;    // kLeave: whether the home has other bytes than the storage by now
};

// What the driver was told of the copy that an end waits for.
struct CopyOrder {
  bool copied = false;  // there was one
  bool behind = false;  // it waits for the lane
  bool waited = false;  // the lane waits for it
};

class AwayStorages {
 public:
  void set_tier(std::shared_ptr<Tier> tier) { tier_ = std::move(tier); }
  void set_tier(std::shared_ptr<DeviceTier> tier);
  bool on_device() const { return device_tier_ != nullptr; }
  // There is a value of this number. Before the tier is set.
  void expect(int value);
  // A persistent value that is away between steps. Returns a tensor of bytes over a storage that
  // stands for the tensor's within steps.
  at::Tensor keep_away(int value, const at::Tensor& tensor);
  // Carries out one end of a move; `slot` is the tensor in the slot that it names. `order`: what
  // order_before has returned, null where nobody has called it.
  void move(const MoveInstruction& move, const at::Tensor* slot, const CopyOrder* order);
  // On the thread that queues the step, before and after `move` was queued on that stream.
  CopyOrder order_before(const MoveInstruction& move, cu::Stream stream);
  void order_after(const MoveInstruction& move, cu::Stream stream);
  // After a step that has failed: nothing has a block any more.
  void abandon();
  // Forgets the persistent values, too.
  void clear();

 private:
  struct Value {
    c10::Storage storage;  // that tensors of the step are over
    c10::Storage user;     // of a persistent value: the user's, its home
    std::size_t home = 0;
    c10::DataPtr block;  // while it is fetched
    std::shared_ptr<Copy> copy;
    std::uint64_t mark = 0;  // of the moment at which its copy was to begin, for the log
  };
  // What the thread that queues knows of a value.
  struct Queued {
    std::shared_ptr<DeviceCopy> copy;
    bool under_way = false;
    bool behind = false;
  };
  using Way = DeviceTier::Way;

  Value& at(int value);
  void* home_of(Value& value) const;
  c10::DataPtr at_home(Value& value) const;
  void wait(Value& value);
  void settle(std::size_t number);
  void begin_copy(int number, const CopyOf& what, const CopyOrder* order);
  void end_copy(int number, Way way, const void* block, const CopyOrder* order);

  std::shared_ptr<Tier> tier_;
  std::shared_ptr<DeviceTier> device_tier_;
  std::vector<Value> values_;
  std::vector<Queued> queued_;  // by value, of a device
};

}  // namespace waterflow
