// Devices: the host, or CUDA through its driver alone. PyTorch's own CUDA library is only needed to
// make its tensors there (cuda/), so that everything here runs on the tests' driver, too.
#include "bind/device.h"

#include <torch/extension.h>

#include <memory>
#include <utility>

#include "core/arena/arena.h"
#include "core/device/cuda_device.h"
#include "core/device/lane_device.h"
#include "core/device/staging.h"
#ifdef WATERFLOW_WITH_CUDA
#include "cuda/cuda_lanes.h"
#endif

namespace py = pybind11;
using namespace py::literals;

namespace waterflow {
namespace {

#ifdef WATERFLOW_WITH_CUDA
constexpr BindStream kBindStream = &bind_cuda_stream;
#else
constexpr BindStream kBindStream = nullptr;
#endif

using Unlocked = py::call_guard<py::gil_scoped_release>;

// Python's threads know a device by the order of its own: calls that may wait run unlocked.
void bind_cuda_device(py::module_& m) {
  py::class_<CudaDevice, std::shared_ptr<CudaDevice>>(m, "CudaDevice")
      .def(py::init([](const std::string& library, int index) {
             return std::make_shared<CudaDevice>(Driver::load(library), index);
           }),
           "library"_a, "index"_a, Unlocked())
      .def_property_readonly("index", &CudaDevice::index)
      .def_property_readonly("name", &CudaDevice::name)
      .def_property_readonly("driver_version",
                             [](const CudaDevice& self) { return self.driver().version(); })
      .def("memory",
           [](const CudaDevice& self) {
             const auto memory = self.memory();
             return std::make_pair(memory.free, memory.total);
           })
      .def_property_readonly("pinned", &CudaDevice::pinned)
      .def_property_readonly("most_pinned", &CudaDevice::most_pinned)
      .def("synchronize", &CudaDevice::synchronize, Unlocked())
      .def("failure", &CudaDevice::failure, Unlocked());
  py::class_<LaneStreams, std::shared_ptr<LaneStreams>>(m, "LaneStreams")
      .def(py::init([](std::shared_ptr<CudaDevice> device, int lanes, bool lasting) {
             return std::make_shared<LaneStreams>(std::move(device), lanes, lasting);
           }),
           "device"_a, "lanes"_a, "lasting"_a = false)
      .def_property_readonly("lanes", &LaneStreams::lanes)
      .def_property_readonly("has_priorities", &LaneStreams::has_priorities)
      .def("set_first", &LaneStreams::set_first, "lane"_a, "first"_a, Unlocked())
      .def("join", &LaneStreams::join, Unlocked())
      .def("drain", &LaneStreams::drain, Unlocked());
}

void bind_lane_device(py::module_& m) {
  py::class_<LaneDevice, std::shared_ptr<LaneDevice>>(m, "LaneDevice")
      .def(py::init([] { return std::make_shared<LaneDevice>(); }))
      .def_static(
          "cuda",
          [](std::shared_ptr<LaneStreams> streams, bool host_functions) {
            const BindStream bind = host_functions ? nullptr : kBindStream;
            return std::shared_ptr<LaneDevice>(
                std::make_shared<CudaLaneDevice>(std::move(streams), bind, host_functions));
          },
          "streams"_a, "host_functions"_a)
      .def("bind", &LaneDevice::bind, "lane"_a)
      .def("set_first", &LaneDevice::set_first, "lane"_a, "first"_a)
      .def("mark", &LaneDevice::mark, "lane"_a)
      .def("wait", &LaneDevice::wait, "mark"_a, Unlocked())
      .def("seconds", &LaneDevice::seconds, "mark"_a);
  py::class_<Mark>(m, "Mark");
}

// The bytes of a page-locked buffer as a host tensor that keeps the buffer alive.
at::Tensor bytes_of(const std::shared_ptr<PinnedBuffer>& buffer) {
  return at::from_blob(
      buffer->data(), {static_cast<std::int64_t>(buffer->bytes())}, [buffer](void*) {},
      at::TensorOptions().dtype(at::kByte));
}

void bind_staging(py::module_& m) {
  py::class_<CudaStream, std::shared_ptr<CudaStream>>(m, "CudaStream")
      .def(py::init([](std::shared_ptr<CudaDevice> device) {
             return std::make_shared<CudaStream>(std::move(device));
           }),
           "device"_a)
      .def("wait", &CudaStream::wait, Unlocked());
  py::class_<PinnedBuffer, std::shared_ptr<PinnedBuffer>>(m, "PinnedBuffer")
      .def(py::init([](std::shared_ptr<CudaDevice> device, std::size_t bytes) {
             return std::make_shared<PinnedBuffer>(std::move(device), bytes);
           }),
           "device"_a, "bytes"_a)
      .def("tensor", &bytes_of)
      .def("wait", &PinnedBuffer::wait, Unlocked());
  py::class_<DeviceInput, std::shared_ptr<DeviceInput>>(m, "DeviceInput")
      .def(py::init([](std::shared_ptr<CudaStream> copies, std::shared_ptr<CudaDevice> device) {
             return std::make_shared<DeviceInput>(std::move(copies), std::move(device));
           }),
           "copies"_a, "device"_a)
      .def(
          "send",
          [](DeviceInput& self, PinnedBuffer& source, const at::Tensor& target, std::size_t bytes) {
            self.send(source, target.mutable_data_ptr(), bytes);
          },
          "source"_a, "target"_a, "bytes"_a);
}

}  // namespace

void bind_device(py::module_& m) {
  bind_cuda_device(m);
  bind_lane_device(m);
  bind_staging(m);
}

}  // namespace waterflow
