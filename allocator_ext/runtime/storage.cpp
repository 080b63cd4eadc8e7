#include "runtime/storage.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <utility>

#include "runtime/lane.h"
#include "runtime/parking.h"

namespace waterflow {
namespace {

c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl();
}

c10::DataPtr take_room(std::size_t bytes, c10::Device device, const std::shared_ptr<Arena>& arena,
                       JobId job) {
  LaneContext lane{arena, 0, job, nullptr};
  void* memory = take_memory(lane, bytes);
  return {memory, memory, &release_memory, device};
}

bool is_ordinary(const c10::DataPtr& pointer) {
  const auto deleter = pointer.get_deleter();
  return deleter == &release_memory || is_parked(pointer) ||
         deleter == c10::GetAllocator(pointer.device().type())->raw_deleter() ||
         deleter == ordinary_memory(pointer.device().type()).deleter;
}

// Returns the arena's memory that the storage had.
c10::DataPtr replace_by_ordinary(c10::StorageImpl* storage, Arena& arena) {
  const c10::Device device = storage->device();
  auto target = ordinary_memory(device.type()).allocate(storage->nbytes(), device);
  arena.copy(target.get(), storage->data(), storage->nbytes());
  return storage->set_data_ptr(std::move(target));
}

}  // namespace

Reservation::Reservation(std::shared_ptr<Arena> arena, c10::DataPtr memory, std::size_t bytes)
    : arena_(std::move(arena)), memory_(std::move(memory)), bytes_(bytes) {}

void Reservation::move(std::size_t offset, JobId job) {
  const std::size_t former = this->offset();
  const c10::Device device = memory_.device();
  memory_.clear();
  arena_->synchronize();
  void* room = arena_->allocate_at(offset, bytes_, 0, job);
  if (room == nullptr) room = arena_->allocate_at(former, bytes_, 0, job);
  TORCH_INTERNAL_ASSERT(room != nullptr, "room that was free a moment ago is taken");
  memory_ = {room, room, &release_memory, device};
}

std::shared_ptr<Reservation> keep_in_place(const at::Tensor& tensor,
                                           const std::shared_ptr<Arena>& arena, JobId job) {
  auto* storage = storage_of(tensor);
  const std::size_t bytes = storage->nbytes();
  if (arena->owns(storage->data())) {
    return std::make_shared<Reservation>(arena, replace_by_ordinary(storage, *arena), bytes);
  }
  auto room = take_room(bytes, storage->device(), arena, job);
  storage->mutable_data();  // a copy-on-write storage gets bytes of its own
  return std::make_shared<Reservation>(arena, std::move(room), bytes);
}

bool may_move(const std::vector<at::Tensor>& tensors, std::size_t own_uses) {
  const c10::Storage& storage = tensors.front().storage();
  // The Python object and this vector; whatever else counts could hand out the address.
  auto is_held = [](const at::Tensor& tensor) { return tensor.use_count() > 2; };
  return is_ordinary(storage.data_ptr()) && storage.use_count() == tensors.size() + own_uses &&
         std::none_of(tensors.begin(), tensors.end(), is_held);
}

void move_into_arena(const at::Tensor& tensor, const std::shared_ptr<Arena>& arena, JobId job) {
  auto* storage = storage_of(tensor);
  if (storage->nbytes() == 0 || arena->owns(storage->data())) return;
  auto room = take_room(storage->nbytes(), storage->device(), arena, job);
  arena->copy(room.get(), storage->data(), storage->nbytes());
  storage->set_data_ptr(std::move(room));
}

void move_out_of_arena(const at::Tensor& tensor, const std::shared_ptr<Arena>& arena) {
  auto* storage = storage_of(tensor);
  if (storage->nbytes() == 0 || !arena->owns(storage->data())) return;
  replace_by_ordinary(storage, *arena);  // what it had dies here and is free
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

at::Tensor copy_in_arena(const at::Tensor& tensor, const std::shared_ptr<Arena>& arena, JobId job) {
  auto* storage = storage_of(tensor);
  const std::size_t bytes = storage->nbytes();
  auto room = take_room(bytes, storage->device(), arena, job);
  arena->copy(room.get(), storage->data(), bytes);
  auto copy = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                    std::move(room), nullptr, /*resizable=*/false);
  auto made = at::empty({0}, at::TensorOptions().dtype(at::kByte).device(storage->device()));
  return made.set_(c10::Storage(std::move(copy)));
}

}  // namespace waterflow
