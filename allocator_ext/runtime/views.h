// What a view operator makes of a tensor depends on the tensor's layout alone, and within a step
// the layout is that of the step before. So a view is made by PyTorch once, and from then on out of
// the layout that it had: without the dispatcher, and without the composite operators behind it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace waterflow {

// Whether sizes, strides and storage tell all of a tensor: no subclass, no symbols.
bool is_plain(const at::Tensor& tensor);

// How a tensor lies in its storage, and as what the dispatcher knows it.
struct TensorLayout {
  explicit TensorLayout(const at::Tensor& tensor);
  bool is_of(const at::Tensor& tensor) const;
  // A tensor of this layout over the other one's storage.
  at::Tensor over(const at::Tensor& other) const;

  c10::SmallVector<int64_t, 5> sizes, strides;
  int64_t offset;
  c10::DispatchKeySet keys;
  caffe2::TypeMeta type;
};

// The views that one operator made of one tensor.
class ViewMemo {
 public:
  // Keeps what the operator made of the tensor, if these are views of it and of nothing else.
  void remember(const at::Tensor& source, const std::vector<c10::IValue>& results);
  // Whether the operator would make the same of this tensor.
  bool serves(const at::Tensor& source) const { return source_ && source_->is_of(source); }
  bool is_list() const { return is_list_; }
  std::size_t size() const { return views_.size(); }
  at::Tensor make(const at::Tensor& source, std::size_t place) const {
    return views_[place].over(source);
  }

 private:
  std::optional<TensorLayout> source_;
  std::vector<TensorLayout> views_;
  bool is_list_ = false;
};

}  // namespace waterflow
