#include "runtime/tape.h"

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/ScalarOps.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <utility>

#include "runtime/bernoulli.h"
#include "runtime/max_pool.h"
#include "runtime/outside.h"
#include "runtime/random.h"
#include "runtime/skew.h"

namespace waterflow {
namespace {

bool is_dense(const at::Tensor& tensor) { return tensor.is_non_overlapping_and_dense(); }

// Between tensors of one layout: on the host at once, on a device in the lane's order.
void copy_bytes(const at::Tensor& target, const at::Tensor& source) {
  if (source.numel() == 0) return;
  if (source.is_cpu()) {
    std::memcpy(target.mutable_data_ptr(), source.const_data_ptr(), source.nbytes());
  } else {
    target.copy_(source, /*non_blocking=*/true);
  }
}

// How many elements the memory of a tensor has, from its first to its last.
int64_t span_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  int64_t span = 1;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    span += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  return span;
}

// An exact twin of the batch tensor in the lane's memory: same sizes, strides and bytes, and
// aligned as it is.
at::Tensor twin(const at::Tensor& source) {
  // Where a device's memory stands for the batch, it was packed there, and aligned by the engine.
  const LaneContext* lane = current_lane();
  const bool is_own = lane == nullptr || lane->arena->alignment() == kAlignment;
  const int64_t skew = is_own ? skew_of(source) : 0, span = span_of(source);
  if (skew != 0) {
    const int64_t bytes = span * static_cast<int64_t>(source.element_size());
    const at::Tensor room = at::empty({bytes + kAlignment}, source.options().dtype(at::kByte));
    char* begin = begin_of(room, skew);
    std::memcpy(begin, source.const_data_ptr(), static_cast<std::size_t>(bytes));
    const auto keep = [room](void*) {};
    return at::from_blob(begin, source.sizes(), source.strides(), keep, source.options());
  }
  if (is_dense(source)) {
    auto copy = at::empty_strided(source.sizes(), source.strides(), source.options());
    copy_bytes(copy, source);
    return copy;
  }
  // Overlapping or gappy strides (expanded or sliced tensors): copy the span that they cover.
  auto bytes = at::empty({span}, source.options());
  copy_bytes(bytes, source.as_strided({span}, {1}));
  return bytes.as_strided(source.sizes(), source.strides(), 0);
}

double power(double base, double exponent) {
  TORCH_CHECK(!(base == 0 && exponent < 0), "0.0 cannot be raised to a negative power");
  TORCH_CHECK(!(base < 0 && std::isfinite(exponent) && exponent != std::floor(exponent)),
              "a negative number has no real power of ", exponent);
  return std::pow(base, exponent);
}

c10::IValue tensor_list(const Argument& argument, const std::vector<at::Tensor>& slots) {
  if (argument.optional_elements) {
    c10::List<std::optional<at::Tensor>> list;
    list.reserve(argument.indices.size());
    for (int index : argument.indices) {
      list.push_back(index < 0 ? std::nullopt : std::optional<at::Tensor>(slots[index]));
    }
    return list;
  }
  c10::List<at::Tensor> list;
  list.reserve(argument.indices.size());
  for (int index : argument.indices) list.push_back(slots[index]);
  return list;
}

c10::IValue scalar_list(const Argument& argument, const std::vector<double>& registers) {
  auto at_place = [&](std::size_t place) {
    const int index = argument.indices[place];
    return index < 0 ? argument.scalars[place] : registers[index];
  };
  if (argument.floats) {
    c10::List<double> list;
    for (std::size_t i = 0; i < argument.indices.size(); ++i) list.push_back(at_place(i));
    return list;
  }
  c10::impl::GenericList list(c10::NumberType::get());
  for (std::size_t i = 0; i < argument.indices.size(); ++i)
    list.push_back(c10::IValue(at_place(i)));
  return list;
}

// The number in a tensor of one element.
double number_in(const at::Tensor& tensor) {
  const bool plain = tensor.is_cpu() && tensor.numel() == 1 && !tensor.is_neg();
  if (plain && tensor.scalar_type() == at::kFloat) return *tensor.const_data_ptr<float>();
  if (plain && tensor.scalar_type() == at::kDouble) return *tensor.const_data_ptr<double>();
  return tensor.item().toDouble();
}

// The slot of the tensor that the operator makes views of, -1 where it does something else, or
// depends on anything that may change from step to step.
int source_of_views(const Instruction& instruction) {
  const c10::FunctionSchema& schema = instruction.op->schema();
  const auto is_view = [](const c10::Argument& result) {
    return result.alias_info() != nullptr && !result.alias_info()->isWrite();
  };
  const auto& results = schema.returns();
  const bool views = std::all_of(results.begin(), results.end(), is_view);
  if (!(views && !results.empty()) && schema.name() != "aten::_unsafe_view") return -1;
  int source = -1;
  for (const Argument& argument : instruction.arguments) {
    if (argument.kind == Argument::Kind::kConstant && !argument.value.isTensor()) continue;
    if (argument.kind != Argument::Kind::kSlot || source >= 0) return -1;
    source = argument.index;
  }
  return source;
}

// The way round the dispatcher that an operator has, if any.
std::unique_ptr<Shortcut> shortcut_of(const c10::FunctionSchema& schema,
                                      const std::shared_ptr<ElementwisePlans>& plans) {
  if (auto found = Elementwise::of(schema, plans)) return found;
  if (auto found = MaxPool::of(schema)) return found;
  return Bernoulli::of(schema);
}

}  // namespace

Tape::Tape(int slots, int registers) : slots_(slots), registers_(registers) {}

void Tape::add(Instruction instruction) {
  if (instruction.kind == Instruction::Kind::kLoad) ++loads_;
  if (instruction.kind == Instruction::Kind::kOperator) {
    instruction.slot = source_of_views(instruction);
    if (instruction.slot >= 0) instruction.views = std::make_unique<ViewMemo>();
    instruction.shortcut = shortcut_of(instruction.op->schema(), plans_);
  }
  if (instruction.kind == Instruction::Kind::kMove) {
    away_.expect(instruction.move.value);
    moves_.push_back(static_cast<int>(instructions_.size()));
  }
  instructions_.push_back(std::move(instruction));
}

void Tape::set_gradient_switches(const std::vector<int>& places) {
  bool on = true;
  auto next = places.begin();
  for (int index = 0; index < size(); ++index) {
    for (; next != places.end() && *next == index; ++next) on = !on;
    instructions_[index].gradients = on;
  }
}

void Tape::run(int start, int stop) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::optional<RandomScope> random;
  if (host_generator_) random.emplace(*host_generator_, device_generator_);
  LaneContext* lane = current_lane();
  MemoryPlan* plan = lane != nullptr ? lane->plan : nullptr;
  const std::function<void()>* pause = lane != nullptr ? lane->pause : nullptr;
  for (int index = start; index < stop; ++index) {
    if (pause != nullptr) (*pause)();
    if (plan != nullptr) plan->begin_instruction(index);
    Instruction& instruction = instructions_[index];
    c10::AutoGradMode gradients(instruction.gradients);
    execute(instruction);
    for (int slot : instruction.release) slots_[slot].reset();
    if (plan != nullptr) plan->end_instruction(*lane->arena, lane->lane);
  }
}

void Tape::execute(Instruction& instruction) {
  switch (instruction.kind) {
    case Instruction::Kind::kOperator:
      return call(instruction);
    case Instruction::Kind::kLoad:
      return load(instruction);
    case Instruction::Kind::kReadScalar:
      registers_[instruction.target] = number_in(slots_[instruction.slot]);
      return;
    case Instruction::Kind::kArithmetic:
      return compute(instruction);
    case Instruction::Kind::kReadLoss:
      return read_loss(slots_[instruction.slot]);
    case Instruction::Kind::kMove:
      return move(instruction);
  }
}

void Tape::call(Instruction& instruction) {
  if (instruction.views && instruction.views->serves(slots_[instruction.slot])) {
    return make_views(instruction);
  }
  stack_.clear();
  for (const Argument& argument : instruction.arguments) push(argument);
  dispatch(instruction);
  store(instruction);
  stack_.clear();
}

// By the dispatcher, or by a way round it that is known to give the same bits.
void Tape::dispatch(Instruction& instruction) {
  if (instruction.shortcut) return instruction.shortcut->run(*instruction.op, stack_);
  instruction.op->callBoxed(stack_);
  if (instruction.views) instruction.views->remember(slots_[instruction.slot], stack_);
}

void Tape::make_views(const Instruction& instruction) {
  const at::Tensor& source = slots_[instruction.slot];
  const ViewMemo& views = *instruction.views;
  const auto make = [&](std::size_t place, int slot) {
    if (slot >= 0) slots_[slot] = views.make(source, place);
  };
  for (std::size_t i = 0; i < instruction.results.size(); ++i) {
    const Result& result = instruction.results[i];
    if (!result.is_list) make(i, result.slot);
    for (std::size_t k = 0; k < result.elements.size(); ++k) make(k, result.elements[k]);
  }
}

void Tape::push(const Argument& argument) {
  switch (argument.kind) {
    case Argument::Kind::kConstant:
      stack_.emplace_back(argument.value);
      return;
    case Argument::Kind::kSlot:
      stack_.emplace_back(slots_[argument.index]);
      return;
    case Argument::Kind::kSlots:
      stack_.emplace_back(tensor_list(argument, slots_));
      return;
    case Argument::Kind::kScalar:
      stack_.emplace_back(registers_[argument.index]);
      return;
    case Argument::Kind::kScalars:
      stack_.emplace_back(scalar_list(argument, registers_));
      return;
    case Argument::Kind::kWrapped:
      *argument.value.toTensor().mutable_data_ptr<double>() = registers_[argument.index];
      stack_.emplace_back(argument.value);
      return;
    case Argument::Kind::kSingle:
      if (argument.index >= 0) {
        *argument.value.toTensor().mutable_data_ptr<float>() =
            static_cast<float>(registers_[argument.index]);
      }
      stack_.emplace_back(argument.value);
      return;
    case Argument::Kind::kGenerator:
      stack_.emplace_back(generator(argument.index == 1));
      return;
  }
}

void Tape::store(const Instruction& instruction) {
  for (std::size_t i = 0; i < instruction.results.size(); ++i) {
    const Result& result = instruction.results[i];
    if (result.is_list) {
      auto list = std::move(stack_[i]).toTensorVector();
      for (std::size_t k = 0; k < result.elements.size(); ++k) {
        if (result.elements[k] >= 0) slots_[result.elements[k]] = std::move(list[k]);
      }
    } else if (result.slot >= 0) {
      slots_[result.slot] = std::move(stack_[i]).toTensor();
    }
  }
}

void Tape::load(const Instruction& instruction) {
  slots_[instruction.slot] = twin(batch_.at(instruction.input));
}

void Tape::read_loss(const at::Tensor& loss) {
  metrics_.clear();
  if (loss.is_cpu() && loss.numel() == 1) {
    loss_ = number_in(loss);
    return;
  }
  if (loss.is_cpu()) {
    const double* numbers = loss.const_data_ptr<double>();
    loss_ = numbers[0];
    metrics_.assign(numbers + 1, numbers + loss.numel());
    return;
  }
  OutsideLane outside;
  loss_ = 0.0;
  const at::Tensor host = numbers_for(loss);
  host.copy_(loss.reshape({-1}), /*non_blocking=*/true);
  loss_ = host;
}

// Host memory for the numbers of the present step: some that nobody reads any more. A job's steps
// come one after another on the device, so what an earlier one copied there has arrived.
at::Tensor Tape::numbers_for(const at::Tensor& loss) {
  for (const at::Tensor& numbers : numbers_) {
    if (numbers.use_count() == 1 && numbers.numel() == loss.numel()) return numbers;
  }
  auto memory = ordinary_memory(loss.device().type()).page_locked(loss.nbytes());
  auto storage =
      c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), loss.nbytes(),
                                            std::move(memory), nullptr, /*resizable=*/false);
  auto numbers = at::empty({0}, loss.options().device(c10::kCPU));
  return numbers_.emplace_back(numbers.set_(c10::Storage(storage), 0, {loss.numel()}, {1}));
}

at::Generator& Tape::generator(bool device) {
  auto& generator = device ? device_generator_ : host_generator_;
  TORCH_INTERNAL_ASSERT(generator.has_value(), "the tape has no random stream for this operator");
  return *generator;
}

void Tape::compute(const Instruction& instruction) {
  const double left = registers_[instruction.left];
  const double right = instruction.right < 0 ? 0 : registers_[instruction.right];
  double& target = registers_[instruction.target];
  switch (instruction.operation) {
    case Arithmetic::kNegate:
      target = -left;
      return;
    case Arithmetic::kAdd:
      target = left + right;
      return;
    case Arithmetic::kSubtract:
      target = left - right;
      return;
    case Arithmetic::kMultiply:
      target = left * right;
      return;
    case Arithmetic::kDivide:
      TORCH_CHECK(right != 0, "float division by zero");
      target = left / right;
      return;
    case Arithmetic::kPower:
      target = power(left, right);
      return;
  }
}

void Tape::move(const Instruction& instruction) {
  const LaneContext* lane = current_lane();
  const at::Tensor* slot = instruction.slot < 0 ? nullptr : &slots_[instruction.slot];
  away_.move(instruction.move, slot, lane == nullptr ? nullptr : lane->order);
}

void Tape::abandon() {
  away_.abandon();
  clear(transient_);
}

void Tape::clear(const std::vector<int>& slots) {
  stack_.clear();
  for (int slot : slots) slots_[slot].reset();
}

}  // namespace waterflow
