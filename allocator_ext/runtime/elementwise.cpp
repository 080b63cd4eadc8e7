#include "runtime/elementwise.h"

// PyTorch's kernels are there once for each set of instructions; its build, not its headers, says
// for which. These are those of its wheels for x86; on other processors all is dispatched.
#if defined(__x86_64__)
#define HAVE_AVX2_CPU_DEFINITION
#define HAVE_AVX512_CPU_DEFINITION
#endif

#include <ATen/EmptyTensor.h>
#include <ATen/native/BinaryOps.h>
#include <ATen/native/Lerp.h>
#include <ATen/native/PointwiseOps.h>
#include <ATen/native/UnaryOps.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>

#include <string>
#include <unordered_map>

#include "runtime/outside.h"

namespace waterflow {
namespace {

// Beyond so many elements the kernel is what takes time, and comparing would take memory.
constexpr int64_t kMostElements = int64_t{1} << 16;

using Kernel = ElementwiseKernel;

const std::unordered_map<std::string, std::pair<Kernel, int>>& known() {
  static const std::unordered_map<std::string, std::pair<Kernel, int>> operators = {
      {"add.Tensor", {Kernel::kAdd, 2}},
      {"sub.Tensor", {Kernel::kSubtract, 2}},
      {"mul.Tensor", {Kernel::kMultiply, 2}},
      {"div.Tensor", {Kernel::kDivide, 2}},
      {"sqrt.", {Kernel::kSqrt, 1}},
      {"sigmoid.", {Kernel::kSigmoid, 1}},
      {"tanh.", {Kernel::kTanh, 1}},
      {"sigmoid_backward.", {Kernel::kSigmoidBackward, 2}},
      {"tanh_backward.", {Kernel::kTanhBackward, 2}},
      {"addcmul.", {Kernel::kAddProduct, 3}},
      {"addcdiv.", {Kernel::kAddQuotient, 3}},
      {"lerp.Scalar", {Kernel::kLerp, 2}},
  };
  return operators;
}

// A number that stands where a tensor could: it has no dimensions.
bool is_number(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

bool is_served(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_cpu() && tensor.scalar_type() == at::kFloat &&
         is_plain(tensor) && !tensor.is_neg() && tensor.numel() > 0 &&
         tensor.numel() <= kMostElements && tensor.is_non_overlapping_and_dense();
}

// A tensor of that layout whose memory nobody will touch.
at::Tensor dummy(const at::Tensor& like) {
  static char nowhere[64];
  return at::from_blob(nowhere, like.sizes(), like.strides(), like.options());
}

}  // namespace

ElementwisePlan::ElementwisePlan(ElementwiseOperator op, const Stack& stack) : op_(op) {
  for (int place = 0; place < op.tensors; ++place) {
    layouts_.emplace_back(stack[place].toTensor());
    dummies_.push_back(dummy(stack[place].toTensor()));
  }
  if (!op.in_place) dummies_.push_back(dummy(stack[0].toTensor()));
  at::TensorIteratorConfig config;  // as PyTorch's binary operators have it
  config.set_check_mem_overlap(true)
      .allow_cpu_scalars(true)
      .promote_inputs_to_common_dtype(true)
      .cast_common_dtype_to_outputs(true)
      .enforce_safe_casting_to_output(true);
  config.add_owned_output(op.in_place ? dummies_.front() : dummies_.back());
  for (int place = 0; place < op.tensors; ++place) config.add_owned_const_input(dummies_[place]);
  iterator_ = std::make_unique<at::TensorIterator>(config.build());
}

bool ElementwisePlan::serves(const ElementwiseOperator& op, const Stack& stack) const {
  if (!(op == op_)) return false;
  for (int place = 0; place < op_.tensors; ++place) {
    if (!layouts_[place].is_of(stack[place].toTensor())) return false;
  }
  return true;
}

void ElementwisePlan::compute(const Stack& stack, const at::Tensor& result) {
  using namespace at::native;
  at::TensorIterator& it = *iterator_;
  it.unsafe_replace_operand(0, result.mutable_data_ptr());
  for (int place = 0; place < op_.tensors; ++place) {
    const void* operand = stack[place].toTensor().const_data_ptr();
    it.unsafe_replace_operand(place + 1, const_cast<void*>(operand));
  }
#if defined(__x86_64__)
  const auto number = [&] { return stack[op_.tensors].toScalar(); };
  switch (op_.kernel) {
    case Kernel::kAdd:
      return add_stub(at::kCPU, it, number());
    case Kernel::kSubtract:
      return add_stub(at::kCPU, it, -number());
    case Kernel::kMultiply:
      return mul_stub(at::kCPU, it);
    case Kernel::kDivide:
      return div_true_stub(at::kCPU, it);
    case Kernel::kSqrt:
      return sqrt_stub(at::kCPU, it);
    case Kernel::kSigmoid:
      return sigmoid_stub(at::kCPU, it);
    case Kernel::kTanh:
      return tanh_stub(at::kCPU, it);
    case Kernel::kSigmoidBackward:
      return sigmoid_backward_stub(at::kCPU, it);
    case Kernel::kTanhBackward:
      return tanh_backward_stub(at::kCPU, it);
    case Kernel::kAddProduct:
      return addcmul_stub(at::kCPU, it, number());
    case Kernel::kAddQuotient:
      return addcdiv_stub(at::kCPU, it, number());
    case Kernel::kLerp:
      return lerp_kernel_scalar_weight(at::kCPU, it, number());
  }
#endif
}

std::unique_ptr<Elementwise> Elementwise::of(const c10::FunctionSchema& schema,
                                             std::shared_ptr<ElementwisePlans> plans) {
#if !defined(__x86_64__)
  return nullptr;
#endif
  std::string name = schema.name();
  if (name.rfind("aten::", 0) != 0) return nullptr;
  name = name.substr(6);
  const bool in_place = name.back() == '_';
  if (in_place) name.pop_back();
  const auto found = known().find(name + "." + schema.overload_name());
  if (found == known().end()) return nullptr;
  const auto [kernel, tensors] = found->second;
  return std::make_unique<Elementwise>(ElementwiseOperator{kernel, tensors, in_place},
                                       std::move(plans));
}

void Elementwise::take(const c10::OperatorHandle& handle, Stack& stack) {
  if (!plan_ || !plan_->serves(op_, stack)) return handle.callBoxed(stack);
  at::Tensor result = stack[0].toTensor();
  if (!op_.in_place) {
    result = at::detail::empty_strided_cpu(result.sizes(), result.strides(), at::kFloat);
  }
  plan_->compute(stack, result);
  stack.resize(1);
  stack[0] = std::move(result);
}

// A number may stand for any tensor but the first, whose layout is the result's.
bool Elementwise::may_plan(const Stack& stack) const {
  const at::Tensor& first = stack[0].toTensor();
  if (!is_served(first) || is_number(first)) return false;
  for (int place = 1; place < op_.tensors; ++place) {
    const at::Tensor& operand = stack[place].toTensor();
    if (!is_served(operand)) return false;
    if (is_number(operand)) continue;
    if (operand.sizes() != first.sizes() || operand.strides() != first.strides()) return false;
    // The kernel is given the memory, not the tensors: it could not tell that they overlap.
    if (op_.in_place && operand.is_alias_of(first)) return false;
  }
  return static_cast<int>(stack.size()) == op_.tensors || stack.back().isScalar();
}

void Elementwise::learn(const c10::OperatorHandle& handle, Stack& stack) {
  if (!may_plan(stack)) return handle.callBoxed(stack);
  for (const auto& plan : *plans_) {
    if (!plan->serves(op_, stack)) continue;
    if (plan->is_exact) plan_ = plan;
    return take(handle, stack);
  }
  Stack before = stack;
  if (op_.in_place) {
    const OutsideLane outside;
    before[0] = before[0].toTensor().clone();
  }
  handle.callBoxed(stack);
  const at::Tensor& expected = stack[0].toTensor();
  const at::Tensor first = before[0].toTensor();
  if (expected.sizes() != first.sizes() || expected.strides() != first.strides()) return;
  const OutsideLane outside;
  auto plan = std::make_shared<ElementwisePlan>(op_, before);
  const at::Tensor result = op_.in_place ? first : at::empty_like(expected);
  plan->compute(before, result);
  plan->is_exact = same_bits(expected, result);
  plans_->push_back(plan);
  if (plan->is_exact) plan_ = plan;
}

}  // namespace waterflow
