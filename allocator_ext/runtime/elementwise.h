// Small elementwise operators, of which an optimizer's update is hundreds, spend most of their time
// on finding out what is the same at every step: the kernel, the common type, the order in which to
// go through memory. That is worked out once here, with PyTorch's own iterator, and the same kernel
// then runs over it with new addresses.
#pragma once

#include <ATen/TensorIterator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <memory>
#include <vector>

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
  using Stack = std::vector<c10::IValue>;
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

// An instruction that calls one of these operators.
//
// It goes round the dispatcher where all operands are float tensors on the host of one dense
// layout, or numbers beside them, and where that has given the operator's bits: who meets layouts
// first does both and compares.
class Elementwise {
 public:
  using Stack = ElementwisePlan::Stack;
  explicit Elementwise(ElementwiseOperator op) : op_(op) {}
  // Null where the operator is none of these.
  static std::unique_ptr<Elementwise> of(const c10::FunctionSchema& schema);
  // Calls the operator, whose arguments the stack holds. `plans` are those of all the tape.
  void run(const c10::OperatorHandle& handle, Stack& stack, ElementwisePlans& plans);

 private:
  bool may_plan(const Stack& stack) const;
  void learn(const c10::OperatorHandle& handle, Stack& stack, ElementwisePlans& plans);

  const ElementwiseOperator op_;
  bool has_learnt_ = false;
  std::shared_ptr<ElementwisePlan> plan_;
};

}  // namespace waterflow
