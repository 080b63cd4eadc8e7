#include "core/device/driver.h"

#include <dlfcn.h>

#include <algorithm>
#include <iterator>

namespace waterflow {
namespace {

// What ends the context, by cuda.h: an uncorrectable memory error, a kernel that went wrong, a
// context that is gone, and the error of unknown origin.
constexpr cu::Result kSticky[] = {4,   214, 220, 226, 700, 702, 709, 710, 714,
                                  715, 716, 717, 718, 719, 721, 810, 911, 999};

std::string sentence(const char* call, const std::string& name, const std::string& text,
                     const std::string& doing) {
  return "the CUDA call " + std::string(call) + " failed " + doing + ": " + name + " (" + text +
         ")";
}

}  // namespace

DriverError::DriverError(const char* call, cu::Result code, const std::string& name,
                         const std::string& text, const std::string& doing)
    : BackendError(sentence(call, name, text, doing)), call_(call), code_(code) {}

bool DriverError::is_sticky(cu::Result code) {
  return std::find(std::begin(kSticky), std::end(kSticky), code) != std::end(kSticky);
}

std::shared_ptr<const Driver> Driver::load(const std::string& library) {
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    throw BackendError("the CUDA driver's library " + library + " cannot be loaded: " +
                       std::string(dlerror()) + "; install the NVIDIA driver, or run on the CPU");
  }
  std::shared_ptr<Driver> driver(new Driver(handle));
  driver->resolve(library);
  WATERFLOW_CUDA(*driver, cuInit, "to initialise the driver", 0);
  WATERFLOW_CUDA(*driver, cuDriverGetVersion, "to tell its version", &driver->version_);
  return driver;
}

Driver::~Driver() { dlclose(library_); }

void Driver::resolve(const std::string& library) {
  auto find = [&](const char* symbol) {
    void* address = dlsym(library_, symbol);
    if (address == nullptr) {
      throw BackendError("the CUDA driver's library " + library + " has no " + symbol +
                         ": update the NVIDIA driver (CUDA 11.2 or newer)");
    }
    return address;
  };
#define WATERFLOW_RESOLVE(symbol, ...) symbol = reinterpret_cast<decltype(symbol)>(find(#symbol));
  WATERFLOW_DRIVER_CALLS(WATERFLOW_RESOLVE)
#undef WATERFLOW_RESOLVE
}

std::string Driver::name_of(cu::Result result) const {
  const char* name = nullptr;
  const bool known = cuGetErrorName(result, &name) == cu::kSuccess && name != nullptr;
  return known ? name : "CUDA error " + std::to_string(result);
}

void Driver::fail(const char* call, cu::Result result, const char* doing) const {
  const char* text = nullptr;
  const bool known = cuGetErrorString(result, &text) == cu::kSuccess && text != nullptr;
  throw DriverError(call, result, name_of(result), known ? text : "no description", doing);
}

int Driver::device_count() const {
  int count = 0;
  WATERFLOW_CUDA(*this, cuDeviceGetCount, "to count the devices", &count);
  return count;
}

}  // namespace waterflow
