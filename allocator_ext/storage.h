// Moves the bytes of a live storage into an arena and back. All tensors, views and names that share
// the storage keep working: only the pointer inside their common StorageImpl changes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <optional>

#include "core/arena.h"

namespace waterflow {

// Memory that a storage had before it moved and that something else may share (a numpy array,
// shared memory, a file mapping): kept, and restored when the storage moves back.
struct FormerMemory {
  c10::DataPtr pointer;
};

// Returns the former memory where it must be kept, nullptr where it was PyTorch's own and is free.
// Does nothing when the storage is empty or already in the arena. Throws c10::OutOfMemoryError.
std::shared_ptr<FormerMemory> move_into_arena(const at::Tensor& tensor,
                                              const std::shared_ptr<Arena>& arena, JobId job);

// Does nothing when the storage is not in the arena.
void move_out_of_arena(const at::Tensor& tensor, const std::shared_ptr<Arena>& arena,
                       const std::shared_ptr<FormerMemory>& former);

// Moves a storage that is in the arena to `offset` of it, or to any place if there is none given.
// Returns whether there was room; the storage stays where it is otherwise.
bool move_within_arena(const at::Tensor& tensor, const std::shared_ptr<Arena>& arena, JobId job,
                       std::optional<std::size_t> offset);

// Gives the storage a private copy of its bytes in `arena` and returns what it had before,
// untouched.
std::shared_ptr<FormerMemory> swap_for_copy(const at::Tensor& tensor,
                                            const std::shared_ptr<Arena>& arena, JobId job);
// Undoes swap_for_copy: the copy and all that was written to it are dropped.
void restore(const at::Tensor& tensor, const std::shared_ptr<FormerMemory>& former);

}  // namespace waterflow
