// Max pooling of images. PyTorch's kernel for contiguous tensors decides by a jump whether a value
// is the largest of its window so far, which took a fifth of the step of a small convolutional
// network. Here several windows are gone through together, without jumps: the same comparisons in
// the same order.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <memory>
#include <optional>
#include <vector>

#include "runtime/views.h"

namespace waterflow {

// An instruction that calls `max_pool2d_with_indices`.
//
// It goes round the dispatcher for contiguous float tensors on the host and windows without gaps,
// where that has given the operator's bits: the first time it does both and compares.
class MaxPool {
 public:
  using Stack = std::vector<c10::IValue>;
  // Null where the operator is another one.
  static std::unique_ptr<MaxPool> of(const c10::FunctionSchema& schema);
  // Calls the operator, whose arguments the stack holds.
  void run(const c10::OperatorHandle& handle, Stack& stack);

 private:
  void learn(const c10::OperatorHandle& handle, Stack& stack);

  bool has_learnt_ = false;
  std::optional<TensorLayout> image_;  // for which it is known to be exact
  std::vector<int64_t> sizes_;         // of what becomes of that
};

}  // namespace waterflow
