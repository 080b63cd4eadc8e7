// The slower tier of a device: page-locked host memory, which it copies to and from by itself, on
// streams of their own beside the lanes, one each way, since the link goes both ways at once.
//
// No host thread waits for a copy. What orders them is events alone:
//
//     a copy out waits for what the lane was given before it, so also for the block's last use;
//     whoever takes the block's room does so on the lane, or behind it, once the lane waits for the
//     copy; a copy in waits for the lane, and so for whoever had the room before; and the lane
//     waits for it before the block's next use. A home in the tier is used again behind the copy in
//     of who had it, since the lane lies between the two.
//
// The stand-in of the tests takes its places late, when the lane's host function runs. There a copy
// is a host function, too, and looks up its addresses when its turn comes.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>

#include "core/arena/backend.h"
#include "core/device/cuda_device.h"
#include "core/device/staging.h"

namespace waterflow {

// The copies of one value, of which at most one is under way.
class DeviceCopy {
 public:
  explicit DeviceCopy(std::shared_ptr<const CudaDevice> device);
  // What to copy next, told in the lane's order.
  void set(const CopyOf& what);

 private:
  friend class DeviceTier;
  CopyOf take();
  void run();
  void cancel();

  CudaEvent done_;
  std::mutex mutex_;  // guards all that follows
  std::condition_variable ended_;
  CopyOf what_{nullptr, nullptr, 0};
  bool running_ = false;
};

class DeviceTier {
 public:
  enum class Way { kOut, kIn };

  // Takes the page-locked memory. Throws DriverError. `host_functions`: see CudaLaneDevice.
  DeviceTier(std::shared_ptr<const CudaDevice> device, std::size_t bytes, bool host_functions);
  ~DeviceTier();

  const std::shared_ptr<const CudaDevice>& device() const { return device_; }
  std::size_t capacity() const { return memory_->bytes(); }
  void* at(std::size_t offset) const { return static_cast<char*>(memory_->data()) + offset; }
  // Bytes that were copied so far, both ways.
  std::size_t moved() const { return moved_.load(); }
  void count(std::size_t bytes) { moved_.fetch_add(bytes); }

  // Queues the value's copy behind all that the lane's stream was given so far. Returns whether it
  // is behind that, for the log.
  bool queue(cu::Stream lane, const std::shared_ptr<DeviceCopy>& copy, Way way);
  // What the lane's stream is given from now on waits for the value's copy. Returns whether it
  // does.
  bool make_wait(cu::Stream lane, const DeviceCopy& copy) const;
  // Returns when nothing touches the value's bytes any more: a step has failed, or is long done.
  // Any thread, a host function's too.
  void settle(DeviceCopy& copy) const;

  // The number of the copier of a way, for the log: see EventKind.
  int copier(Way way) const { return first_copier_ + static_cast<int>(way); }

 private:
  struct Road {
    std::unique_ptr<CudaStream> stream;
    std::unique_ptr<CudaEvent> reached;  // of the lane, recorded anew for every copy
  };

  std::shared_ptr<const CudaDevice> device_;
  const bool host_functions_;
  const int first_copier_;
  std::unique_ptr<PinnedBuffer> memory_;
  std::mutex mutex_;  // guards the records of the roads' events
  Road roads_[2];
  std::atomic<std::size_t> moved_{0};
};

}  // namespace waterflow
