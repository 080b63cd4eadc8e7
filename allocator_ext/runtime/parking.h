// Storages that are parked: their bytes lie in page-locked host memory, which the device reads in
// place, at the same address as the host. So their tensors stay what they are, on the device, and
// whoever reads one between steps finds its numbers there; that is slow, and never wrong.
//
// This is the safe form of AntMan's universal memory (section 3.1): managed memory would move pages
// behind everybody's back, and more of it than the device has free can hang the machine.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "core/arena/arena.h"
#include "core/device/staging.h"

namespace waterflow {

// Bytes of page-locked memory that parking these tensors' storages takes.
std::size_t parked_bytes(const std::vector<at::Tensor>& tensors);

// Moves the storages behind these tensors, each another one, to `memory`, which lives for as long
// as one of them is there. What memory they had is free. Only while no lane is at work.
void park(const std::vector<at::Tensor>& tensors, const std::shared_ptr<PinnedBuffer>& memory,
          Arena& arena);

bool is_parked(const at::Tensor& tensor);
bool is_parked(const c10::DataPtr& pointer);

// Brings a storage that is parked to ordinary memory of its device. Throws c10::OutOfMemoryError.
void unpark(const at::Tensor& tensor, Arena& arena);

}  // namespace waterflow
