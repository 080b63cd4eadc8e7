#include "core/device/cuda_backend.h"

#include <algorithm>
#include <string>
#include <utility>

namespace waterflow {
namespace {

// A mapping can only be undone whole, so a piece is what the arena gives back at least. Larger
// ones would make it coarse, smaller ones cost a call of some microseconds each.
constexpr std::size_t kPiece = std::size_t{64} << 20;

cu::AllocationProperties properties_of(const CudaDevice& device) {
  cu::AllocationProperties properties{};
  properties.type = cu::kAllocationPinned;
  properties.location = {cu::kLocationDevice, device.handle()};
  return properties;
}

}  // namespace

CudaBackend::CudaBackend(std::shared_ptr<LaneStreams> streams, std::size_t capacity)
    : streams_(std::move(streams)), capacity_(capacity) {
  const auto properties = properties_of(device());
  WATERFLOW_CUDA(driver(), cuMemGetAllocationGranularity, "to learn the size of a page", &page_,
                 &properties, cu::kGranularityMinimum);
  // Room to grow to all of the device; addresses cost nothing.
  reserved_ = in_pages(std::max(capacity, device().memory().total));
  WATERFLOW_CUDA(driver(), cuMemAddressReserve, "to reserve addresses for the arena", &base_,
                 reserved_, 0, 0, 0);
}

// Errors do not matter any more here: after a lost context all of these calls fail.
CudaBackend::~CudaBackend() {
  try {
    device().synchronize();
  } catch (const DriverError&) {
  }
  for (const Piece& piece : pieces_) {
    driver().cuMemUnmap(base_ + piece.offset, piece.bytes);
    driver().cuMemRelease(piece.memory);
  }
  driver().cuMemAddressFree(base_, reserved_);
}

void CudaBackend::commit() {
  map_until(capacity_);
  committed_ = true;
}

bool CudaBackend::resize(std::size_t capacity) {
  if (in_pages(capacity) > reserved_) return false;
  if (committed_) {
    const std::size_t before = mapped_;
    try {
      map_until(capacity);
      unmap_down_to(capacity);
    } catch (const BackendError&) {
      map_until(before);  // what a shrink had given back already is needed again
      return false;
    }
  }
  capacity_ = capacity;
  return true;
}

void CudaBackend::map_until(std::size_t bytes) {
  const std::size_t before = mapped_;
  const std::size_t wanted = in_pages(bytes);
  try {
    while (mapped_ < wanted) map_piece(std::min(kPiece, wanted - mapped_));
  } catch (const DriverError& error) {
    unmap_down_to(before);
    refuse(bytes, error);
  }
}

void CudaBackend::map_piece(std::size_t bytes) {
  const auto properties = properties_of(device());
  Piece piece{0, mapped_, bytes};
  WATERFLOW_CUDA(driver(), cuMemCreate, "to take memory for the arena", &piece.memory, bytes,
                 &properties, 0);
  bool is_mapped = false;
  try {
    WATERFLOW_CUDA(driver(), cuMemMap, "to map the arena's memory", base_ + piece.offset, bytes, 0,
                   piece.memory, 0);
    is_mapped = true;
    const cu::AccessDescription access{properties.location, cu::kAccessReadWrite};
    WATERFLOW_CUDA(driver(), cuMemSetAccess, "to allow access to the arena", base_ + piece.offset,
                   bytes, &access, 1);
  } catch (const DriverError&) {
    if (is_mapped) driver().cuMemUnmap(base_ + piece.offset, bytes);
    driver().cuMemRelease(piece.memory);
    throw;
  }
  pieces_.push_back(piece);
  mapped_ += bytes;
}

// Gives back the pieces that lie wholly above; work that still runs may yet touch them.
void CudaBackend::unmap_down_to(std::size_t bytes) {
  if (pieces_.empty() || pieces_.back().offset < bytes) return;
  device().synchronize();
  while (!pieces_.empty() && pieces_.back().offset >= bytes) {
    const Piece piece = pieces_.back();
    WATERFLOW_CUDA(driver(), cuMemUnmap, "to unmap the arena's memory", base_ + piece.offset,
                   piece.bytes);
    pieces_.pop_back();
    mapped_ -= piece.bytes;
    WATERFLOW_CUDA(driver(), cuMemRelease, "to give memory back", piece.memory);
  }
}

void CudaBackend::refuse(std::size_t bytes, const DriverError& error) const {
  if (!error.out_of_memory()) throw error;
  const auto memory = device().memory();
  throw BackendError("CUDA device " + std::to_string(device().index()) + " (" + device().name() +
                     ") has " + std::to_string(memory.free) + " of " +
                     std::to_string(memory.total) + " bytes free, the arena needs " +
                     std::to_string(in_pages(bytes) - mapped_) +
                     " more; choose a smaller budget or free memory on the device");
}

void CudaBackend::copy(void* target, const void* source, std::size_t bytes) {
  copy_all({{target, source, bytes}});
}

// Moves what persists while no lane is at work; the user's own streams may have written it last.
void CudaBackend::copy_all(const std::vector<CopyOf>& copies) {
  device().synchronize();
  {
    ContextScope scope(device());
    for (const CopyOf& one : copies) {
      WATERFLOW_CUDA(driver(), cuMemcpyAsync, "to move a tensor",
                     reinterpret_cast<cu::DevicePointer>(one.target),
                     reinterpret_cast<cu::DevicePointer>(one.source), one.bytes,
                     streams_->stream(0));
    }
  }
  streams_->drain();
}

}  // namespace waterflow
