// How memory is aligned: kernels may sum in another order where it is aligned otherwise, so whoever
// copies a tensor for the sake of its bits keeps that, too.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace waterflow {

// To which torch aligns memory of its own, in bytes.
constexpr std::int64_t kAlignment = 64;

// How far behind such an address a tensor on the host begins: a view of another one, say, or an
// array of numpy's.
inline std::int64_t skew_of(const at::Tensor& tensor) {
  if (!tensor.is_cpu() || tensor.numel() == 0) return 0;
  return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) %
                                   static_cast<std::uintptr_t>(kAlignment));
}

// Where in `room`, which has that many bytes more than are needed, a tensor of this skew begins.
inline char* begin_of(const at::Tensor& room, std::int64_t skew) {
  auto* begin = static_cast<char*>(room.mutable_data_ptr());
  const std::int64_t own = skew_of(room);
  return begin + (skew - own + kAlignment) % kAlignment;
}

}  // namespace waterflow
