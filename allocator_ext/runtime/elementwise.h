// Small elementwise operators, of which an optimizer's update is hundreds, spend most of their time
// on finding out what is the same at every step: the kernel, the common type, the order in which to
// go through memory. That is worked out once here, with PyTorch's own iterator, and the same kernel
// then runs over it with new addresses.
#pragma once

#include <ATen/TensorIterator.h>

#include <memory>
#include <vector>

#include "runtime/shortcut.h"
#include "runtime/views.h"

namespace waterflow {

// The kernels that are known here, each behind an operator and its in-place form.
enum class ElementwiseKernel {
  kAdd,
  kSubtract,
  kMultiply,
  kDivide,
  kSqrt,
  kSigmoid,
  kTanh,
  kSigmoidBackward,
  kTanhBackward,
  kAddProduct,
  kAddQuotient,
  kLerp,
};

struct ElementwiseOperator {
  ElementwiseKernel kernel;
  int tensors;  // arguments that are tensors; a number may follow them
  bool in_place;
  bool operator==(const ElementwiseOperator& other) const {
    return kernel == other.kernel && tensors == other.tensors && in_place == other.in_place;
  }
};

// An operator on operands of certain layouts. All such instructions of a tape share it.
class ElementwisePlan {
 public:
  using Stack = Shortcut::Stack;
  ElementwisePlan(ElementwiseOperator op, const Stack& stack);
  bool serves(const ElementwiseOperator& op, const Stack& stack) const;
  // Runs the kernel on the arguments that the stack holds.
  void compute(const Stack& stack, const at::Tensor& result);
  // Whether `compute` gives the dispatched operator's bits; else the plan is never used.
  bool is_exact = false;

 private:
  const ElementwiseOperator op_;
  std::vector<TensorLayout> layouts_;
  std::vector<at::Tensor> dummies_;  // with the layouts of operands and result, but no memory
  std::unique_ptr<at::TensorIterator> iterator_;
};

using ElementwisePlans = std::vector<std::shared_ptr<ElementwisePlan>>;

// Of one of these operators, where all operands are float tensors on the host of one dense layout,
// or numbers beside them. Who meets layouts first learns for all others of the tape.
class Elementwise final : public Shortcut {
 public:
  Elementwise(ElementwiseOperator op, std::shared_ptr<ElementwisePlans> plans)
      : op_(op), plans_(std::move(plans)) {}
  // Null where the operator is none of these. `plans` are those of all the tape.
  static std::unique_ptr<Elementwise> of(const c10::FunctionSchema& schema,
                                         std::shared_ptr<ElementwisePlans> plans);

 private:
  void learn(const c10::OperatorHandle& handle, Stack& stack) override;
  void take(const c10::OperatorHandle& handle, Stack& stack) override;
  bool may_plan(const Stack& stack) const;

  const ElementwiseOperator op_;
  const std::shared_ptr<ElementwisePlans> plans_;
  std::shared_ptr<ElementwisePlan> plan_;
};

}  // namespace waterflow
