// Device memory by CUDA's virtual memory calls: a range of addresses is reserved once, and memory
// is mapped into it piece by piece, so that the arena grows and shrinks while its tensors stay
// where they are.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "core/arena/backend.h"
#include "core/device/cuda_device.h"

namespace waterflow {

class CudaBackend final : public Backend {
 public:
  // Reserves addresses; commit() takes the memory. Throws BackendError.
  CudaBackend(std::shared_ptr<LaneStreams> streams, std::size_t capacity);
  ~CudaBackend() override;
  CudaBackend(const CudaBackend&) = delete;
  CudaBackend& operator=(const CudaBackend&) = delete;

  void* base() const override { return reinterpret_cast<void*>(base_); }
  std::size_t capacity() const override { return capacity_; }
  std::size_t taken() const override { return mapped_; }
  // Events on the lanes' streams: the host goes on at once.
  void synchronize() override { streams_->join(); }
  void commit() override;
  bool resize(std::size_t capacity) override;
  void give_back(std::size_t offset) override { unmap_down_to(offset); }
  void copy(void* target, const void* source, std::size_t bytes) override;
  void copy_all(const std::vector<CopyOf>& copies) override;
  void finish() override { streams_->drain(); }

 private:
  struct Piece {
    cu::MemoryHandle memory;
    std::size_t offset;
    std::size_t bytes;
  };

  const CudaDevice& device() const { return *streams_->device(); }
  const Driver& driver() const { return device().driver(); }
  std::size_t in_pages(std::size_t bytes) const { return (bytes + page_ - 1) / page_ * page_; }
  void map_until(std::size_t bytes);
  void map_piece(std::size_t bytes);
  void unmap_down_to(std::size_t bytes);
  [[noreturn]] void refuse(std::size_t bytes, const DriverError& error) const;

  std::shared_ptr<LaneStreams> streams_;
  std::size_t capacity_;
  bool committed_ = false;
  std::size_t page_ = 0;      // granularity of the device's mappings
  std::size_t reserved_ = 0;  // bytes of addresses
  std::size_t mapped_ = 0;    // bytes of memory, from the base on
  cu::DevicePointer base_ = 0;
  std::vector<Piece> pieces_;
};

}  // namespace waterflow
