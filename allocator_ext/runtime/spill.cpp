#include "runtime/spill.h"

#include <ATen/Functions.h>
#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

#include <utility>

namespace waterflow {

at::Tensor AwayStorages::keep_away(int number, const at::Tensor& tensor) {
  Value& value = at(number);
  value = {};
  value.user = tensor.storage();
  value.user.mutable_data();  // a copy-on-write storage gets bytes of its own
  value.storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), value.user.nbytes(), at_home(value), nullptr,
      /*resizable=*/false);
  auto bytes = at::empty({0}, at::TensorOptions().dtype(at::kByte).device(value.user.device()));
  return bytes.set_(value.storage);
}

void AwayStorages::move(const MoveInstruction& move, const at::Tensor* slot) {
  Value& value = at(move.value);
  switch (move.end) {
    case MoveEnd::kLeave:
      if (!value.user) {
        value.storage = slot->storage();
        value.home = move.home;
      }
      if (move.copies) {
        value.copy = tier_->copy(home_of(value), value.storage.data(), value.storage.nbytes());
      }
      return;
    case MoveEnd::kGone:
      wait(value);
      value.storage.set_data_ptr(at_home(value));  // what it had is free here
      return;
    case MoveEnd::kFetch: {
      const auto device = value.storage.device().type();
      value.block = c10::GetAllocator(device)->allocate(value.storage.nbytes());
      value.copy = tier_->copy(value.block.get(), home_of(value), value.storage.nbytes());
      return;
    }
    case MoveEnd::kBack:
      wait(value);
      value.storage.set_data_ptr(std::move(value.block));
      if (!value.user) value.storage = {};  // the step's slots hold it
      return;
  }
}

void AwayStorages::abandon() {
  for (Value& value : values_) {
    wait(value);
    value.block.clear();
    if (value.user) {
      value.storage.set_data_ptr(at_home(value));
    } else {
      value.storage = {};
    }
  }
}

void AwayStorages::clear() {
  abandon();
  values_.clear();
}

AwayStorages::Value& AwayStorages::at(int value) {
  TORCH_INTERNAL_ASSERT(value >= 0 && tier_, "a value moves that has no number, or to no tier");
  if (values_.size() <= static_cast<std::size_t>(value)) values_.resize(value + 1);
  return values_[value];
}

void* AwayStorages::home_of(Value& value) const {
  return value.user ? value.user.mutable_data() : tier_->at(value.home);
}

c10::DataPtr AwayStorages::at_home(Value& value) const {
  const c10::Device device = value.user ? value.user.device() : value.storage.device();
  return {home_of(value), device};
}

void AwayStorages::wait(Value& value) {
  if (value.copy) tier_->wait(*value.copy);
  value.copy.reset();
}

}  // namespace waterflow
