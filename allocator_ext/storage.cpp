#include "storage.h"

#include <utility>

#include "lane.h"

namespace waterflow {
namespace {

c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl();
}

c10::DataPtr arena_copy(c10::StorageImpl* storage, const std::shared_ptr<Arena>& arena, JobId job) {
  LaneContext lane{arena, 0, job, nullptr};
  void* memory = take_memory(lane, storage->nbytes());
  c10::DataPtr owner{memory, memory, &release_memory, storage->device()};
  // mutable_data also gives a copy-on-write storage bytes of its own first.
  arena->copy(memory, storage->mutable_data(), storage->nbytes());
  return owner;
}

bool is_ordinary(const c10::DataPtr& pointer) {
  const auto deleter = pointer.get_deleter();
  return deleter == &release_memory ||
         deleter == c10::GetAllocator(pointer.device().type())->raw_deleter() ||
         deleter == ordinary_memory(pointer.device().type()).deleter;
}

}  // namespace

std::shared_ptr<FormerMemory> move_into_arena(const at::Tensor& tensor,
                                              const std::shared_ptr<Arena>& arena, JobId job) {
  auto* storage = storage_of(tensor);
  if (storage->nbytes() == 0 || arena->owns(storage->data())) return nullptr;
  auto former = swap_for_copy(tensor, arena, job);
  return is_ordinary(former->pointer) ? nullptr : former;
}

void move_out_of_arena(const at::Tensor& tensor, const std::shared_ptr<Arena>& arena,
                       const std::shared_ptr<FormerMemory>& former) {
  auto* storage = storage_of(tensor);
  if (storage->nbytes() == 0 || !arena->owns(storage->data())) return;
  const c10::Device device = storage->device();
  c10::DataPtr target = former ? std::move(former->pointer)
                               : ordinary_memory(device.type()).allocate(storage->nbytes(), device);
  arena->copy(target.get(), storage->data(), storage->nbytes());
  storage->set_data_ptr(std::move(target));  // the old pointer dies here and frees arena memory
}

bool move_within_arena(const at::Tensor& tensor, const std::shared_ptr<Arena>& arena, JobId job,
                       std::optional<std::size_t> offset) {
  auto* storage = storage_of(tensor);
  void* memory = offset ? arena->allocate_at(*offset, storage->nbytes(), 0, job)
                        : arena->allocate(storage->nbytes(), 0, job);
  if (memory == nullptr) return false;
  c10::DataPtr target{memory, memory, &release_memory, storage->device()};
  arena->copy(memory, storage->data(), storage->nbytes());
  storage->set_data_ptr(std::move(target));  // the old place becomes free here
  arena->synchronize();
  return true;
}

std::shared_ptr<FormerMemory> swap_for_copy(const at::Tensor& tensor,
                                            const std::shared_ptr<Arena>& arena, JobId job) {
  auto* storage = storage_of(tensor);
  auto former = std::make_shared<FormerMemory>();
  former->pointer = storage->set_data_ptr(arena_copy(storage, arena, job));
  return former;
}

void restore(const at::Tensor& tensor, const std::shared_ptr<FormerMemory>& former) {
  storage_of(tensor)->set_data_ptr(std::move(former->pointer));
}

}  // namespace waterflow
