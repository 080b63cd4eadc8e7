#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstring>
#include <optional>

namespace waterflow {

// Bytes of the host that are copied sooner than another thread gives the interpreter lock back.
constexpr std::size_t kFewBytes = 1 << 18;

// Whether a tensor's elements are what its memory holds. Asked from Python, a tensor gives up the
// interpreter lock for each of these questions.
inline bool has_plain_bits(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_conj() && !tensor.is_neg();
}

// Whether two tensors on the host are laid out alike, in one piece, and their memory holds the
// same.
inline bool has_same_bits(const at::Tensor& left, const at::Tensor& right) {
  const bool plain = has_plain_bits(left) && has_plain_bits(right) && left.is_cpu() &&
                     right.is_cpu() && left.is_contiguous() && right.is_contiguous();
  if (!plain || left.scalar_type() != right.scalar_type() || left.sizes() != right.sizes()) {
    return false;
  }
  if (left.nbytes() == 0) return true;
  std::optional<pybind11::gil_scoped_release> unlocked;
  if (left.nbytes() > kFewBytes) unlocked.emplace();
  return std::memcmp(left.const_data_ptr(), right.const_data_ptr(), left.nbytes()) == 0;
}

// Whether rows of a tensor, stacked, are what `select_rows` gives.
inline bool has_plain_rows(const at::Tensor& tensor) {
  return has_plain_bits(tensor) && tensor.is_cpu() && tensor.dim() > 0 && tensor.is_contiguous() &&
         !tensor.requires_grad() && !tensor.is_inference();
}

}  // namespace waterflow
