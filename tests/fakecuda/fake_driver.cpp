// Errors, devices, contexts, and the gate that every call passes.
#include "fake_driver.h"

#include <algorithm>
#include <cstdio>
#include <iterator>

namespace fake {
namespace {

struct NamedError {
  cu::Result code;
  const char* name;
  const char* text;
};

constexpr NamedError kErrors[] = {
    {cu::kSuccess, "CUDA_SUCCESS", "no error"},
    {kInvalidValue, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {cu::kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {kDeinitialized, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {kNoDevice, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {214, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered"},
    {kOperatingSystem, "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported"},
    {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {cu::kNotReady, "CUDA_ERROR_NOT_READY", "device not ready"},
    {kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {kContextIsDestroyed, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {kNotPermitted, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

const NamedError* find_error(cu::Result code) {
  const auto* found = std::find_if(std::begin(kErrors), std::end(kErrors),
                                   [&](const NamedError& error) { return error.code == code; });
  return found == std::end(kErrors) ? nullptr : found;
}

constexpr std::uintptr_t kFirstContext = 0x100;

cu::Context context_of(cu::Device device) {
  return reinterpret_cast<cu::Context>(kFirstContext + device);
}

cu::Device device_of(cu::Context context) {
  const std::uintptr_t handle = reinterpret_cast<std::uintptr_t>(context);
  const bool known = handle >= kFirstContext && handle < kFirstContext + kMaxDevices;
  return known ? static_cast<cu::Device>(handle - kFirstContext) : -1;
}

std::vector<cu::Context>& context_stack() {
  thread_local std::vector<cu::Context> stack;
  return stack;
}

cu::Result refuse(const char* symbol, Needs needs) {
  State& fake = state();
  const long number = ++fake.calls[symbol];
  if (const auto planned = fake.faults.find(symbol); planned != fake.faults.end()) {
    if (auto fault = planned->second.extract(number)) return fault.mapped();
  }
  if (needs == Needs::kNothing) return cu::kSuccess;
  if (fake.broken != cu::kSuccess) return fake.broken;
  if (in_host_function()) return kNotPermitted;
  if (needs == Needs::kLibrary) return cu::kSuccess;
  if (!fake.initialised) return kNotInitialized;
  if (needs == Needs::kInit) return cu::kSuccess;
  if (current_device() < 0) return kInvalidContext;
  return fake.retained[current_device()] == 0 ? kContextIsDestroyed : cu::kSuccess;
}

}  // namespace

State& state() {
  static State& only = *new State;
  return only;
}

bool& in_host_function() {
  thread_local bool inside = false;
  return inside;
}

cu::Device current_device() {
  return context_stack().empty() ? -1 : device_of(context_stack().back());
}

Call::Call(const char* symbol, Needs needs) : lock(state().mutex), refusal(refuse(symbol, needs)) {}

}  // namespace fake

using namespace fake;

extern "C" {

cu::Result cuInit(unsigned flags) {
  FAKE_CALL(kLibrary);
  if (flags != 0) return kInvalidValue;
  if (state().devices == 0) return kNoDevice;
  state().initialised = true;
  return cu::kSuccess;
}

cu::Result cuDriverGetVersion(int* version) {
  FAKE_CALL(kLibrary);
  *version = 13000;
  return cu::kSuccess;
}

cu::Result cuGetErrorName(cu::Result code, const char** name) {
  FAKE_CALL(kNothing);
  const NamedError* error = find_error(code);
  *name = error == nullptr ? nullptr : error->name;
  return error == nullptr ? kInvalidValue : cu::kSuccess;
}

cu::Result cuGetErrorString(cu::Result code, const char** text) {
  FAKE_CALL(kNothing);
  const NamedError* error = find_error(code);
  *text = error == nullptr ? nullptr : error->text;
  return error == nullptr ? kInvalidValue : cu::kSuccess;
}

cu::Result cuDeviceGetCount(int* count) {
  FAKE_CALL(kInit);
  *count = state().devices;
  return cu::kSuccess;
}

cu::Result cuDeviceGet(cu::Device* device, int ordinal) {
  FAKE_CALL(kInit);
  if (!state().valid(ordinal)) return kInvalidDevice;
  *device = ordinal;
  return cu::kSuccess;
}

cu::Result cuDeviceGetName(char* name, int length, cu::Device device) {
  FAKE_CALL(kInit);
  if (!state().valid(device)) return kInvalidDevice;
  if (length <= 0) return kInvalidValue;
  std::snprintf(name, static_cast<std::size_t>(length), "Fake GPU %d", device);
  return cu::kSuccess;
}

cu::Result cuDeviceGetAttribute(int* value, int attribute, cu::Device device) {
  FAKE_CALL(kInit);
  if (!state().valid(device)) return kInvalidDevice;
  if (attribute <= 0) return kInvalidValue;
  const auto found = state().attributes.find(attribute);
  const int usual = attribute == cu::kAttributeVirtualMemory ? 1 : 0;
  *value = found == state().attributes.end() ? usual : found->second;
  return cu::kSuccess;
}

cu::Result cuDevicePrimaryCtxRetain(cu::Context* context, cu::Device device) {
  FAKE_CALL(kInit);
  if (!state().valid(device)) return kInvalidDevice;
  ++state().retained[device];
  *context = context_of(device);
  return cu::kSuccess;
}

cu::Result cuDevicePrimaryCtxRelease_v2(cu::Device device) {
  FAKE_CALL(kInit);
  if (!state().valid(device)) return kInvalidDevice;
  if (state().retained[device] == 0) return kInvalidContext;
  if (--state().retained[device] == 0) abandon_objects(device);
  return cu::kSuccess;
}

cu::Result cuCtxPushCurrent_v2(cu::Context context) {
  FAKE_CALL(kInit);
  const cu::Device device = device_of(context);
  if (!state().valid(device) || state().retained[device] == 0) return kInvalidContext;
  context_stack().push_back(context);
  ++state().pushed;
  return cu::kSuccess;
}

cu::Result cuCtxPopCurrent_v2(cu::Context* context) {
  Call call(__func__, Needs::kInit);
  // A broken context is still taken off, or the thread would keep it beyond fake_reset.
  const bool proceeds = call.refusal == cu::kSuccess || call.refusal == state().broken;
  if (!proceeds) return call.refusal;
  if (context_stack().empty()) return call.refusal == cu::kSuccess ? kInvalidContext : call.refusal;
  if (context != nullptr) *context = context_stack().back();
  context_stack().pop_back();
  --state().pushed;
  return call.refusal;
}

}  // extern "C"
