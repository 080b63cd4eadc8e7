// Whether a way round the dispatcher has given what the operator gives.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstring>

namespace waterflow {

// Of two tensors on the host, of one layout without gaps.
inline bool same_bits(const at::Tensor& one, const at::Tensor& other) {
  return std::memcmp(one.const_data_ptr(), other.const_data_ptr(), one.nbytes()) == 0;
}

}  // namespace waterflow
