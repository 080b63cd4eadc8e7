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
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <vector>

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

class AwayStorages {
 public:
  void set_tier(std::shared_ptr<Tier> tier) { tier_ = std::move(tier); }
  const std::shared_ptr<Tier>& tier() const { return tier_; }
  // A persistent value that is away between steps. Returns a tensor of bytes over a storage that
  // stands for the tensor's within steps.
  at::Tensor keep_away(int value, const at::Tensor& tensor);
  // Carries out one end of a move; `slot` is the tensor in the slot that it names.
  void move(const MoveInstruction& move, const at::Tensor* slot);
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
  };
  Value& at(int value);
  void* home_of(Value& value) const;
  c10::DataPtr at_home(Value& value) const;
  void wait(Value& value);

  std::shared_ptr<Tier> tier_;
  std::vector<Value> values_;
};

}  // namespace waterflow
