// PyTorch's CUDA tensors from a lane's arena. This folder is only built where PyTorch itself is
// built for CUDA: nothing else here needs CUDA's headers.
#pragma once

#include <pybind11/pybind11.h>

#include "core/device/driver.h"

namespace waterflow {

// Puts the lane-aware allocator in front of PyTorch's CUDA allocator, once per process; before or
// after CUDA was initialised. All that no lane asks for goes on to the allocator that was there.
void install_cuda_lane_allocator();

// The calling thread's work goes to this stream of this device. While the thread is a lane, only
// tensors made on this stream come from its arena: a freed block of the arena may be used again on
// the lane's own stream at once, on no other. nullptr: the device's default stream, and a lane's
// tensors come from its arena on whatever stream they are made.
void bind_cuda_stream(int device, cu::Stream stream);

void bind_cuda(pybind11::module_& m);

}  // namespace waterflow
