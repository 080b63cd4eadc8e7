#include "core/device/staging.h"

#include <stdexcept>
#include <string>
#include <utility>

namespace waterflow {

PinnedBuffer::PinnedBuffer(std::shared_ptr<const CudaDevice> device, std::size_t bytes)
    : device_(std::move(device)), bytes_(bytes), sent_(device_, /*timed=*/false) {
  ContextScope scope(*device_);
  WATERFLOW_CUDA(device_->driver(), cuMemHostAlloc, "to take page-locked host memory", &data_,
                 bytes, 0);
  device_->count_pinned(static_cast<std::ptrdiff_t>(bytes));
}

PinnedBuffer::~PinnedBuffer() {
  try {
    wait();                       // a copy may still read it
  } catch (const DriverError&) {  // then nothing is copied any more
  }
  in_context(*device_, [this] { device_->driver().cuMemFreeHost(data_); });
  device_->count_pinned(-static_cast<std::ptrdiff_t>(bytes_));
}

DeviceInput::DeviceInput(std::shared_ptr<CudaStream> copies,
                         std::shared_ptr<const CudaDevice> device)
    : copies_(std::move(copies)),
      device_(std::move(device)),
      filled_(device_, /*timed=*/false),
      emptied_(device_, /*timed=*/false) {}

void DeviceInput::send(PinnedBuffer& source, void* target, std::size_t bytes) {
  if (bytes > source.bytes()) {
    throw std::invalid_argument("a batch of " + std::to_string(bytes) +
                                " bytes is not in a buffer of " + std::to_string(source.bytes()));
  }
  emptied_.make_wait(copies_->get());
  {
    ContextScope scope(*device_);
    WATERFLOW_CUDA(device_->driver(), cuMemcpyAsync, "to copy a batch to the device",
                   reinterpret_cast<cu::DevicePointer>(target),
                   reinterpret_cast<cu::DevicePointer>(source.data()), bytes, copies_->get());
  }
  filled_.record(copies_->get());
  source.sent_.record(copies_->get());
}

}  // namespace waterflow
