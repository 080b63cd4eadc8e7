#include "runtime/views.h"

#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <utility>

namespace waterflow {

bool is_plain(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.has_storage() &&
         !tensor.is_nested() && !tensor._is_zerotensor() &&
         !tensor.unsafeGetTensorImpl()->is_python_dispatch() &&
         !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

TensorLayout::TensorLayout(const at::Tensor& tensor)
    : sizes(tensor.sizes()),
      strides(tensor.strides()),
      offset(tensor.storage_offset()),
      keys(tensor.key_set()),
      type(tensor.dtype()) {}

bool TensorLayout::is_of(const at::Tensor& tensor) const {
  return tensor.key_set() == keys && tensor.dtype() == type && tensor.storage_offset() == offset &&
         tensor.sizes() == sizes && tensor.strides() == strides;
}

at::Tensor TensorLayout::over(const at::Tensor& other) const {
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW,
                                                       c10::Storage(other.storage()), keys, type);
  view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return view;
}

void ViewMemo::remember(const at::Tensor& source, const std::vector<c10::IValue>& results) {
  source_.reset();
  views_.clear();
  is_list_ = results.size() == 1 && results[0].isTensorList();
  std::vector<at::Tensor> made;
  if (is_list_) {
    made = results[0].toTensorVector();
  } else {
    for (const auto& result : results) {
      if (!result.isTensor()) return;
      made.push_back(result.toTensor());
    }
  }
  const bool views_alone =
      is_plain(source) && std::all_of(made.begin(), made.end(), [&](auto& view) {
        return is_plain(view) && view.is_alias_of(source) && view.dtype() == source.dtype();
      });
  if (!views_alone) return;
  for (const auto& view : made) views_.emplace_back(view);
  source_.emplace(source);
}

}  // namespace waterflow
