// Gives live storages their place in an arena. Where a device keeps them in place, only room is
// reserved; else their bytes move in and back: all tensors, views and names that share a storage
// keep working, as only the pointer inside their common StorageImpl changes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "core/arena/arena.h"

namespace waterflow {

// Room in an arena for a storage whose bytes are elsewhere. The arena counts it as the job's;
// nobody touches its pages. It is free again when this object is gone.
class Reservation {
 public:
  // Takes over memory of the arena that a storage had.
  Reservation(std::shared_ptr<Arena> arena, c10::DataPtr memory, std::size_t bytes);
  std::size_t offset() const { return arena_->offset_of(memory_.get()); }
  // Takes its room at `offset` instead, if that is free. Only while no lane is at work.
  void move(std::size_t offset, JobId job);

 private:
  std::shared_ptr<Arena> arena_;
  c10::DataPtr memory_;
  std::size_t bytes_;
};

// Reserves room for a storage on the job's account and gives it bytes of its own, outside: one that
// has memory of the arena is copied out and leaves its room behind, a copy-on-write one is copied.
// Throws c10::OutOfMemoryError.
std::shared_ptr<Reservation> keep_in_place(const at::Tensor& tensor,
                                           const std::shared_ptr<Arena>& arena, JobId job);

// Whether the storage that these tensors share may get another address: its memory is PyTorch's own
// or an arena's, and nobody else refers to it or to them (another tensor, DLPack), who may know the
// address. `own_uses` are references that are none of that kind.
bool may_move(const std::vector<at::Tensor>& tensors, std::size_t own_uses);

// Does nothing when the storage is empty or already in the arena. Throws c10::OutOfMemoryError.
void move_into_arena(const at::Tensor& tensor, const std::shared_ptr<Arena>& arena, JobId job);

// Does nothing when the storage is not in the arena.
void move_out_of_arena(const at::Tensor& tensor, const std::shared_ptr<Arena>& arena);

// Moves a storage that is in the arena to `offset` of it, or to any place if there is none given.
// Returns whether there was room; the storage stays where it is otherwise.
bool move_within_arena(const at::Tensor& tensor, const std::shared_ptr<Arena>& arena, JobId job,
                       std::optional<std::size_t> offset);

// A copy of the storage's bytes in `arena`, as a tensor of bytes.
at::Tensor copy_in_arena(const at::Tensor& tensor, const std::shared_ptr<Arena>& arena, JobId job);

}  // namespace waterflow
