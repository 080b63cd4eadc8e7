#include "core/device/arenas.h"

#include "core/device/cuda_backend.h"
#include "core/device/host_backend.h"

namespace waterflow {
namespace {

// What PyTorch's own CUDA allocator guarantees: kernels and libraries choose by it.
constexpr std::size_t kCudaAlignment = 512;

Options options_for(int lanes) {
  Options options;
  options.lanes = lanes;
  return options;
}

std::size_t whole_units(std::size_t capacity, const Options& options) {
  return capacity - capacity % options.alignment;
}

}  // namespace

std::shared_ptr<Arena> host_arena(std::size_t capacity, int lanes) {
  const Options options = options_for(lanes);
  auto backend = std::make_unique<HostBackend>(whole_units(capacity, options));
  return std::make_shared<Arena>(std::move(backend), options);
}

std::shared_ptr<Arena> virtual_arena(std::size_t capacity, int lanes) {
  return std::make_shared<Arena>(std::make_unique<VirtualBackend>(capacity), options_for(lanes));
}

std::shared_ptr<Arena> cuda_arena(const std::shared_ptr<LaneStreams>& streams, std::size_t capacity,
                                  TensorKind tensors) {
  Options options = options_for(streams->lanes());
  options.alignment = kCudaAlignment;
  auto backend = std::make_unique<CudaBackend>(streams, whole_units(capacity, options));
  return std::make_shared<Arena>(std::move(backend), options, tensors);
}

}  // namespace waterflow
