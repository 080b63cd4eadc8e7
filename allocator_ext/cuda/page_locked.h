// Page-locked host memory for the few numbers that a step leaves, which the device writes while the
// host goes on. PyTorch's own remembers the stream that a copy ran on and asks it when it is freed;
// where the device is lost by then, that ends the process.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace waterflow {

// A host tensor of one dimension. Its memory is used again once nobody has it, by whoever asks
// next: all copies to it must be done before.
at::Tensor page_locked_tensor(std::int64_t elements, c10::ScalarType dtype);

}  // namespace waterflow
