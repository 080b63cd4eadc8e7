// Masks of dropout. PyTorch's kernel draws two words of its generator for each element, one call
// after the other, which is a third of the step of a small perceptron. Here the words are made by
// the hundred, in loops that a compiler makes wide: the same words, and the generator ends where it
// would have ended.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <memory>
#include <vector>

namespace waterflow {

// An instruction that calls `bernoulli_` with one probability for all elements.
//
// It goes round the dispatcher for contiguous float tensors on the host, where that has given the
// operator's bits and left the generator in the same state: the first time it does both.
class Bernoulli {
 public:
  using Stack = std::vector<c10::IValue>;
  // Null where the operator is another one.
  static std::unique_ptr<Bernoulli> of(const c10::FunctionSchema& schema);
  // Calls the operator, whose arguments the stack holds.
  void run(const c10::OperatorHandle& handle, Stack& stack);

 private:
  void learn(const c10::OperatorHandle& handle, Stack& stack);

  bool has_learnt_ = false, is_exact_ = false;
};

}  // namespace waterflow
