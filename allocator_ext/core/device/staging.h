// Batches on their way to the device: page-locked host memory, one copy stream beside the lanes,
// and for each job a device input in device memory that the next batch fills while the present step
// runs.
#pragma once

#include <cstddef>
#include <memory>

#include "core/device/cuda_device.h"

namespace waterflow {

// Host memory that the device copies from by itself.
class PinnedBuffer {
 public:
  // Throws DriverError.
  PinnedBuffer(std::shared_ptr<const CudaDevice> device, std::size_t bytes);
  ~PinnedBuffer();
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;

  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  friend class DeviceInput;
  std::shared_ptr<const CudaDevice> device_;
  std::size_t bytes_;
  void* data_ = nullptr;
  CudaEvent sent_;

 public:
  void wait() const { sent_.wait(); }  // the host waits until it may write to it again
};

class DeviceInput {
 public:
  explicit DeviceInput(std::shared_ptr<CudaStream> copies,
                       std::shared_ptr<const CudaDevice> device);

  // Queues the copy of `bytes` to `target`, behind the step that read the former batch.
  void send(PinnedBuffer& source, void* target, std::size_t bytes);
  const CudaEvent& filled() const { return filled_; }  // a step that reads the batch waits for it
  CudaEvent& emptied() { return emptied_; }            // recorded when a step has read it

 private:
  std::shared_ptr<CudaStream> copies_;
  std::shared_ptr<const CudaDevice> device_;
  CudaEvent filled_;
  CudaEvent emptied_;
};

}  // namespace waterflow
