// Page-locked host memory for the few numbers that a step leaves, which the device writes while the
// host goes on. PyTorch's own remembers the stream that a copy ran on and asks it when it is freed;
// where the device is lost by then, that ends the process.
#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>

namespace waterflow {

// Used again once it is let go of, by whoever asks next: all copies to it must be done before.
c10::DataPtr page_locked_memory(std::size_t bytes);

}  // namespace waterflow
