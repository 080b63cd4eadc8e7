// Max pooling of images. PyTorch's kernel for contiguous tensors decides by a jump whether a value
// is the largest of its window so far, which took a fifth of the step of a small convolutional
// network. Here several windows are gone through together, without jumps: the same comparisons in
// the same order.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "runtime/shortcut.h"
#include "runtime/views.h"

namespace waterflow {

// Of `max_pool2d_with_indices`, for contiguous float tensors on the host and windows without gaps.
class MaxPool final : public Shortcut {
 public:
  // Null where the operator is another one.
  static std::unique_ptr<MaxPool> of(const c10::FunctionSchema& schema);

 private:
  void learn(const c10::OperatorHandle& handle, Stack& stack) override;
  void take(const c10::OperatorHandle& handle, Stack& stack) override;

  std::optional<TensorLayout> image_;  // for which it is known to be exact
  std::vector<int64_t> sizes_;         // of what becomes of that
};

}  // namespace waterflow
