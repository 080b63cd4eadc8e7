// Masks of dropout. PyTorch's kernel draws two words of its generator for each element, one call
// after the other, which is a third of the step of a small perceptron. Here the words are made by
// the hundred, in loops that a compiler makes wide: the same words, and the generator ends where it
// would have ended.
#pragma once

#include <memory>

#include "runtime/shortcut.h"

namespace waterflow {

// Of `bernoulli_` with one probability for all elements, for contiguous float tensors on the host.
// It is to leave the generator in the operator's state, too.
class Bernoulli final : public Shortcut {
 public:
  // Null where the operator is another one.
  static std::unique_ptr<Bernoulli> of(const c10::FunctionSchema& schema);

 private:
  void learn(const c10::OperatorHandle& handle, Stack& stack) override;
  void take(const c10::OperatorHandle& handle, Stack& stack) override;

  bool is_exact_ = false;
};

}  // namespace waterflow
