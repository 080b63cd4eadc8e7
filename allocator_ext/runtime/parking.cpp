#include "runtime/parking.h"

#include <c10/util/Exception.h>

#include <utility>

#include "runtime/lane.h"

namespace waterflow {
namespace {

// As PyTorch's own allocators guarantee: kernels choose by it.
constexpr std::size_t kAlignment = 512;

using Held = std::shared_ptr<PinnedBuffer>;

void release_parked(void* context) { delete static_cast<Held*>(context); }

std::size_t rounded(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl();
}

}  // namespace

std::size_t parked_bytes(const std::vector<at::Tensor>& tensors) {
  std::size_t bytes = 0;
  for (const at::Tensor& tensor : tensors) bytes += rounded(storage_of(tensor)->nbytes());
  return bytes;
}

void park(const std::vector<at::Tensor>& tensors, const std::shared_ptr<PinnedBuffer>& memory,
          Arena& arena) {
  TORCH_CHECK(parked_bytes(tensors) <= memory->bytes(), "storages of ", parked_bytes(tensors),
              " bytes cannot be parked in ", memory->bytes());
  std::vector<CopyOf> copies;
  std::size_t offset = 0;
  for (const at::Tensor& tensor : tensors) {
    auto* storage = storage_of(tensor);
    storage->mutable_data();  // a copy-on-write storage gets bytes of its own
    copies.push_back(
        {static_cast<char*>(memory->data()) + offset, storage->data(), storage->nbytes()});
    offset += rounded(storage->nbytes());
  }
  arena.copy_all(copies);
  for (std::size_t number = 0; number < tensors.size(); ++number) {
    auto* storage = storage_of(tensors[number]);
    storage->set_data_ptr(
        {copies[number].target, new Held(memory), &release_parked, storage->device()});
  }
}

bool is_parked(const c10::DataPtr& pointer) { return pointer.get_deleter() == &release_parked; }

bool is_parked(const at::Tensor& tensor) { return is_parked(tensor.storage().data_ptr()); }

void unpark(const at::Tensor& tensor, Arena& arena) {
  if (!is_parked(tensor)) return;
  auto* storage = storage_of(tensor);
  const c10::Device device = storage->device();
  auto target = ordinary_memory(device.type()).allocate(storage->nbytes(), device);
  arena.copy(target.get(), storage->data(), storage->nbytes());
  storage->set_data_ptr(std::move(target));
}

}  // namespace waterflow
