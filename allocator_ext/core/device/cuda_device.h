// One CUDA device through its primary context, the same that PyTorch uses; and the lanes' streams
// on it, which order their work among each other by events, so that no host thread ever waits.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/arena/mark.h"
#include "core/arena/types.h"
#include "core/device/driver.h"

namespace waterflow {

class CudaDevice {
 public:
  // Throws BackendError: no such device, or one without virtual memory management.
  CudaDevice(std::shared_ptr<const Driver> driver, int index);
  ~CudaDevice();
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  const Driver& driver() const { return *driver_; }
  int index() const { return index_; }
  cu::Device handle() const { return handle_; }
  cu::Context context() const { return context_; }
  const std::string& name() const { return name_; }

  struct Memory {
    std::size_t free;
    std::size_t total;
  };
  Memory memory() const;
  void synchronize() const;  // the host waits for all work on the device
  // Empty while the context works; else what broke it. Never throws.
  std::string failure() const;

 private:
  void find(int index);
  void check_features() const;

  std::shared_ptr<const Driver> driver_;
  int index_;
  cu::Device handle_ = 0;
  cu::Context context_ = nullptr;
  std::string name_;
};

// While alive, the device's context is current on the calling thread.
class ContextScope {
 public:
  explicit ContextScope(const CudaDevice& device) : driver_(device.driver()) {
    WATERFLOW_CUDA(driver_, cuCtxPushCurrent_v2, "to make the device current", device.context());
  }
  ~ContextScope() {
    cu::Context popped;
    driver_.cuCtxPopCurrent_v2(&popped);
  }
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  const Driver& driver_;
};

// For destructors: where the context is lost there is nothing to release.
template <typename Function>
void in_context(const CudaDevice& device, Function function) {
  cu::Context popped;
  if (device.driver().cuCtxPushCurrent_v2(device.context()) != cu::kSuccess) return;
  function();
  device.driver().cuCtxPopCurrent_v2(&popped);
}

// An event of a device; destroyed with its owner.
class CudaEvent final : public DeviceEvent {
 public:
  CudaEvent(std::shared_ptr<const CudaDevice> device, bool timed);
  ~CudaEvent() override;
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  void record(cu::Stream stream);
  void make_wait(cu::Stream stream) const;  // what comes next on it waits for the last record
  void wait() const;                        // the host waits for the last record
  double seconds_since(const CudaEvent& earlier) const;  // both timed and done

 private:
  std::shared_ptr<const CudaDevice> device_;
  cu::Event event_ = nullptr;
};

// A stream that does not wait for the legacy default stream; destroyed with its owner.
class CudaStream {
 public:
  explicit CudaStream(std::shared_ptr<const CudaDevice> device);
  ~CudaStream();
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  cu::Stream get() const { return stream_; }
  void wait() const;  // the host waits for all that is queued

 private:
  std::shared_ptr<const CudaDevice> device_;
  cu::Stream stream_ = nullptr;
};

// One stream per lane.
class LaneStreams {
 public:
  LaneStreams(std::shared_ptr<const CudaDevice> device, int lanes);

  const std::shared_ptr<const CudaDevice>& device() const { return device_; }
  int lanes() const { return static_cast<int>(streams_.size()); }
  cu::Stream stream(Lane lane) const { return streams_.at(lane)->get(); }

  // What comes next on any lane waits for all that is queued on every lane. Asynchronous.
  void join();
  void drain() const;  // the host waits for all lanes
  // Queues host work in the lane's order. CUDA forbids it to call CUDA.
  void launch(Lane lane, std::function<void()> work);

 private:
  std::shared_ptr<const CudaDevice> device_;
  std::vector<std::unique_ptr<CudaStream>> streams_;
  std::mutex mutex_;  // guards the records of the events that follow: joins come one at a time
  std::vector<std::unique_ptr<CudaEvent>> reached_;  // per lane, recorded anew by every join
};

}  // namespace waterflow
