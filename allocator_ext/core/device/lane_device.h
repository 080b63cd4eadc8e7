// What the lanes' work runs on: the host, where a group is done when its call returns, or a CUDA
// device, where it is only queued then.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "core/arena/mark.h"
#include "core/arena/types.h"
#include "core/device/cuda_device.h"

namespace waterflow {

// The host itself.
class LaneDevice {
 public:
  virtual ~LaneDevice() = default;

  virtual void bind(Lane) {}  // the calling thread becomes the lane
  // Does the work, or queues it, in the lane's order.
  virtual void execute(Lane, const std::function<void()>& work) { work(); }
  virtual void drain() {}  // returns when all that was executed has thrown or never will
  virtual bool queues() const { return false; }      // whether work may go on after execute returns
  virtual bool calls_back() const { return false; }  // whether work may run after execute returns

  virtual Mark mark(Lane) { return {steady_seconds(), nullptr}; }
  virtual void wait(const Mark&) {}  // the host waits
  virtual double seconds(const Mark& mark) { return mark.seconds; }

  // Whether the lane's work goes before that of others from now on, where the device can do that.
  // Called by the lane's own thread.
  virtual void set_first(Lane, bool) {}
  virtual cu::Stream stream(Lane) { return nullptr; }

  virtual void wait_event(Lane, const DeviceEvent&) {}  // the lane's next work waits for the event
  virtual void record(Lane, CudaEvent&) {}              // the event happens after the lane's work
};

// Makes a lane's stream the one to which PyTorch gives the calling thread's work.
using BindStream = void (*)(int device, cu::Stream stream);

// A CUDA device. PyTorch's kernels are queued by the calls themselves. Without a GPU the tests'
// driver stands in, whose memory is the host's: there each group is queued as one host function,
// so that host kernels run as late, and as far out of step, as a device's would.
//
// `host_functions` is a seam for the tests alone, and yet part of what is shipped: a module of
// theirs that added such a device would be built against this one's hidden classes and against the
// same pybind11 and torch, all to leave out the ten lines that ask for it.
class CudaLaneDevice final : public LaneDevice {
 public:
  CudaLaneDevice(std::shared_ptr<LaneStreams> streams, BindStream bind, bool host_functions);

  void bind(Lane lane) override;
  void execute(Lane lane, const std::function<void()>& work) override;
  void drain() override;
  bool queues() const override { return true; }
  bool calls_back() const override { return host_functions_; }
  Mark mark(Lane lane) override;
  void wait(const Mark& mark) override;
  double seconds(const Mark& mark) override;
  void set_first(Lane lane, bool first) override;
  cu::Stream stream(Lane lane) override { return streams_->stream(lane); }
  void wait_event(Lane lane, const DeviceEvent& event) override;
  void record(Lane lane, CudaEvent& event) override;

 private:
  std::shared_ptr<LaneStreams> streams_;
  BindStream bind_;
  bool host_functions_;
  std::mutex mutex_;  // guards all that follows: any lane marks, and asks for times
  std::vector<std::shared_ptr<CudaEvent>> events_;  // made so far, for use again
  std::size_t next_event_ = 0;
  Mark origin_;  // whose time is known; a device tells differences only
};

}  // namespace waterflow
