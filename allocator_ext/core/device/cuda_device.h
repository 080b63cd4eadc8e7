// One CUDA device through its primary context, the same that PyTorch uses; and the lanes' streams
// on it, which order their work among each other by events, so that no host thread ever waits.
#pragma once

#include <atomic>
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

  // Page-locked host memory that this object's users have taken: now, and at most so far.
  void count_pinned(std::ptrdiff_t bytes) const;
  std::size_t pinned() const { return pinned_.load(); }
  std::size_t most_pinned() const { return most_pinned_.load(); }

  // The priorities that streams can have; the greater, the lower the number. Both are equal where
  // the device knows none.
  struct Priorities {
    int least;
    int greatest;
  };
  Priorities priorities() const;

 private:
  void find(int index);
  void check_features() const;

  std::shared_ptr<const Driver> driver_;
  int index_;
  cu::Device handle_ = 0;
  cu::Context context_ = nullptr;
  std::string name_;
  mutable std::atomic<std::size_t> pinned_{0};
  mutable std::atomic<std::size_t> most_pinned_{0};
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

// For destructors, which nobody calls again: what a call that fails once would leave stays for
// good. Where the context is lost, and the next call fails as well, there is nothing to release.
template <typename Function>
void in_context(const CudaDevice& device, Function function) {
  const auto push = [&device] {
    return device.driver().cuCtxPushCurrent_v2(device.context()) == cu::kSuccess;
  };
  cu::Context popped;
  if (!push() && !push()) return;
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

// A stream that does not wait for the legacy default stream; destroyed with its owner, unless it is
// to last: then the next owner of such a one gets it. PyTorch remembers the streams that it was
// given, with its page-locked blocks and its libraries' workspaces, and asks them long after.
class CudaStream {
 public:
  explicit CudaStream(std::shared_ptr<const CudaDevice> device);
  CudaStream(std::shared_ptr<const CudaDevice> device, int priority, bool lasting = false);
  ~CudaStream();
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  cu::Stream get() const { return stream_; }
  void wait() const;  // the host waits for all that is queued

 private:
  std::shared_ptr<const CudaDevice> device_;
  int priority_ = 0;
  bool lasting_ = false;
  cu::Stream stream_ = nullptr;
};

// A lane's streams: one, or where the device knows priorities one of the least and one of the
// greatest. A lane works on one of them at a time, and in order whichever that is.
class LaneStreams {
 public:
  LaneStreams(std::shared_ptr<const CudaDevice> device, int lanes, bool lasting = false);

  const std::shared_ptr<const CudaDevice>& device() const { return device_; }
  int lanes() const { return static_cast<int>(lanes_.size()); }
  cu::Stream stream(Lane lane) const { return lanes_.at(lane)->present()->get(); }

  bool has_priorities() const { return has_priorities_; }
  bool goes_first(Lane lane) const { return lanes_.at(lane)->first.load(); }
  // From now on the lane's work goes before that of others, or not, behind what it has been given
  // so far. Called by the lane's own thread. Returns whether its stream is another now.
  bool set_first(Lane lane, bool first);

  // What comes next on any lane waits for all that is queued on every lane. Asynchronous.
  void join();
  void drain() const;  // the host waits for all lanes
  // Queues host work in the lane's order. CUDA forbids it to call CUDA.
  void launch(Lane lane, std::function<void()> work);

 private:
  struct OneLane {
    std::unique_ptr<CudaStream> usual, urgent;  // `urgent` is null without priorities
    std::unique_ptr<CudaEvent> reached;         // recorded anew by every join
    std::unique_ptr<CudaEvent> switched;
    std::atomic<bool> first{false};
    CudaStream* present() const { return first.load() ? urgent.get() : usual.get(); }
  };

  std::shared_ptr<const CudaDevice> device_;
  bool has_priorities_ = false;
  std::vector<std::unique_ptr<OneLane>> lanes_;
  std::mutex mutex_;  // guards the records of the events, and which stream a lane is on: joins and
                      // switches come one at a time
};

// Queues host work on a stream. CUDA forbids it to call CUDA.
void launch_on(const CudaDevice& device, cu::Stream stream, std::function<void()> work);

}  // namespace waterflow
