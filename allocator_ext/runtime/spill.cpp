#include "runtime/spill.h"

#include <ATen/Functions.h>
#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <utility>

#include "runtime/lane.h"

namespace waterflow {
namespace {

std::uint64_t new_mark() {
  static std::atomic<std::uint64_t> marks{0};
  return ++marks;
}

LaneContext& lane_at_work() {
  LaneContext* lane = current_lane();
  TORCH_INTERNAL_ASSERT(lane != nullptr, "a storage moves on a thread that is no lane");
  return *lane;
}

}  // namespace

void AwayStorages::set_tier(std::shared_ptr<DeviceTier> tier) {
  device_tier_ = std::move(tier);
  queued_.clear();
  queued_.resize(values_.size());
}

void AwayStorages::expect(int value) {
  if (values_.size() <= static_cast<std::size_t>(value)) values_.resize(value + 1);
}

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

void AwayStorages::move(const MoveInstruction& move, const at::Tensor* slot,
                        const CopyOrder* order) {
  Value& value = at(move.value);
  const std::size_t bytes = value.storage ? value.storage.nbytes() : 0;
  switch (move.end) {
    case MoveEnd::kLeave:
      if (!value.user) {
        value.storage = slot->storage();
        value.home = move.home;
      }
      if (move.copies) {
        const CopyOf out{home_of(value), value.storage.data(), value.storage.nbytes()};
        begin_copy(move.value, out, order);
      }
      return;
    case MoveEnd::kGone:
      end_copy(move.value, Way::kOut, value.storage.data(), order);
      value.storage.set_data_ptr(at_home(value));  // what it had is free here
      return;
    case MoveEnd::kFetch:
      value.block = c10::GetAllocator(value.storage.device().type())->allocate(bytes);
      begin_copy(move.value, {value.block.get(), home_of(value), bytes}, order);
      return;
    case MoveEnd::kBack:
      end_copy(move.value, Way::kIn, value.block.get(), order);
      value.storage.set_data_ptr(std::move(value.block));
      if (!value.user) value.storage = {};  // the step's slots hold it
      return;
  }
}

void AwayStorages::begin_copy(int number, const CopyOf& what, const CopyOrder* order) {
  Value& value = at(number);
  if (!device_tier_) {
    value.copy = tier_->copy(what.target, what.source, what.bytes);
    return;
  }
  device_tier_->count(what.bytes);
  const LaneContext& lane = lane_at_work();
  if (order == nullptr) {
    lane.arena->copy(what.target, what.source, what.bytes);
    return;
  }
  queued_.at(number).copy->set(what);
  value.mark = new_mark();
  lane.arena->note(EventKind::kMark, lane.lane, value.mark, 0);
}

// The log has the copy here, where it is known what the driver was told, with the moment at which
// it was to begin. Whatever else happens to its block in between is the lane's own.
void AwayStorages::end_copy(int number, Way way, const void* block, const CopyOrder* order) {
  Value& value = at(number);
  if (!device_tier_) return wait(value);
  if (order == nullptr || !order->copied) return;
  const LaneContext& lane = lane_at_work();
  Arena& arena = *lane.arena;
  if (!arena.owns(block)) return;
  const int copier = device_tier_->copier(way);
  arena.note(EventKind::kCopy, copier, arena.offset_of(block), order->behind ? value.mark : 0);
  if (order->waited) arena.note(EventKind::kJoin, lane.lane, copier, 0);
  if (way == Way::kIn && arena.find(block)) arena.use(block, lane.lane);
}

CopyOrder AwayStorages::order_before(const MoveInstruction& move, cu::Stream stream) {
  Queued& queued = queued_.at(move.value);
  // Most values never move; those that do are met here first, before their copies are.
  if (!queued.copy) queued.copy = std::make_shared<DeviceCopy>(device_tier_->device());
  const bool ends = move.end == MoveEnd::kGone || move.end == MoveEnd::kBack;
  if (!ends || !std::exchange(queued.under_way, false)) return {};
  return {true, queued.behind, device_tier_->make_wait(stream, *queued.copy)};
}

void AwayStorages::order_after(const MoveInstruction& move, cu::Stream stream) {
  const bool leaves = move.end == MoveEnd::kLeave && move.copies;
  if (!leaves && move.end != MoveEnd::kFetch) return;
  Queued& queued = queued_.at(move.value);
  queued.behind = device_tier_->queue(stream, queued.copy, leaves ? Way::kOut : Way::kIn);
  queued.under_way = true;
}

void AwayStorages::abandon() {
  for (std::size_t number = 0; number < values_.size(); ++number) {
    Value& value = values_[number];
    settle(number);
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
  const std::size_t count = values_.size();
  values_.clear();
  values_.resize(count);
}

AwayStorages::Value& AwayStorages::at(int value) {
  TORCH_INTERNAL_ASSERT(value >= 0 && (tier_ || device_tier_),
                        "a value moves that has no number, or to no tier");
  return values_.at(value);
}

void* AwayStorages::home_of(Value& value) const {
  if (value.user) return value.user.mutable_data();
  return device_tier_ ? device_tier_->at(value.home) : tier_->at(value.home);
}

c10::DataPtr AwayStorages::at_home(Value& value) const {
  const c10::Device device = value.user ? value.user.device() : value.storage.device();
  return {home_of(value), device};
}

void AwayStorages::wait(Value& value) {
  if (value.copy) tier_->wait(*value.copy);
  value.copy.reset();
}

void AwayStorages::settle(std::size_t number) {
  if (device_tier_) {
    if (queued_.at(number).copy) device_tier_->settle(*queued_[number].copy);
  } else {
    wait(values_[number]);
  }
}

}  // namespace waterflow
