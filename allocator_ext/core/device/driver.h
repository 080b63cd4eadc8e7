// The part of the CUDA driver's interface that the arena uses, loaded at run time: the extension
// builds, imports and is tested on machines that have neither a toolkit nor a driver.
//
// Types and constants are those of cuda.h, written out; a test compiles them against the real
// header where there is one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "core/arena/types.h"

namespace waterflow {

namespace cu {

using Result = int;
using Device = int;
using DevicePointer = unsigned long long;
using MemoryHandle = unsigned long long;
using HostFunction = void (*)(void*);
struct ContextObject;
struct StreamObject;
struct EventObject;
using Context = ContextObject*;
using Stream = StreamObject*;
using Event = EventObject*;

struct Location {
  int type;
  int id;
};
struct AllocationProperties {
  int type;
  int handle_types;
  Location location;
  void* win32_meta_data;
  struct {
    unsigned char compression;
    unsigned char gpu_direct_rdma;
    unsigned short usage;
    unsigned char reserved[4];
  } flags;
};
struct AccessDescription {
  Location location;
  int flags;
};

inline constexpr Result kSuccess = 0;
inline constexpr Result kOutOfMemory = 2;
inline constexpr Result kNotReady = 600;
inline constexpr int kAllocationPinned = 1;
inline constexpr int kLocationDevice = 1;
inline constexpr int kAccessReadWrite = 3;
inline constexpr int kGranularityMinimum = 0;
inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventDefault = 0;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr int kAttributeVirtualMemory = 102;

}  // namespace cu

// Symbol, then parameter types. Names with _v2 are what cuda.h's macros stand for.
#define WATERFLOW_DRIVER_CALLS(CALL)                                                              \
  CALL(cuInit, unsigned)                                                                          \
  CALL(cuDriverGetVersion, int*)                                                                  \
  CALL(cuGetErrorName, cu::Result, const char**)                                                  \
  CALL(cuGetErrorString, cu::Result, const char**)                                                \
  CALL(cuDeviceGetCount, int*)                                                                    \
  CALL(cuDeviceGet, cu::Device*, int)                                                             \
  CALL(cuDeviceGetName, char*, int, cu::Device)                                                   \
  CALL(cuDeviceGetAttribute, int*, int, cu::Device)                                               \
  CALL(cuDevicePrimaryCtxRetain, cu::Context*, cu::Device)                                        \
  CALL(cuDevicePrimaryCtxRelease_v2, cu::Device)                                                  \
  CALL(cuCtxPushCurrent_v2, cu::Context)                                                          \
  CALL(cuCtxPopCurrent_v2, cu::Context*)                                                          \
  CALL(cuCtxSynchronize)                                                                          \
  CALL(cuCtxGetStreamPriorityRange, int*, int*)                                                   \
  CALL(cuMemGetInfo_v2, std::size_t*, std::size_t*)                                               \
  CALL(cuMemGetAllocationGranularity, std::size_t*, const cu::AllocationProperties*, int)         \
  CALL(cuMemAddressReserve, cu::DevicePointer*, std::size_t, std::size_t, cu::DevicePointer,      \
       unsigned long long)                                                                        \
  CALL(cuMemAddressFree, cu::DevicePointer, std::size_t)                                          \
  CALL(cuMemCreate, cu::MemoryHandle*, std::size_t, const cu::AllocationProperties*,              \
       unsigned long long)                                                                        \
  CALL(cuMemRelease, cu::MemoryHandle)                                                            \
  CALL(cuMemMap, cu::DevicePointer, std::size_t, std::size_t, cu::MemoryHandle,                   \
       unsigned long long)                                                                        \
  CALL(cuMemUnmap, cu::DevicePointer, std::size_t)                                                \
  CALL(cuMemSetAccess, cu::DevicePointer, std::size_t, const cu::AccessDescription*, std::size_t) \
  CALL(cuMemHostAlloc, void**, std::size_t, unsigned)                                             \
  CALL(cuMemFreeHost, void*)                                                                      \
  CALL(cuMemcpyAsync, cu::DevicePointer, cu::DevicePointer, std::size_t, cu::Stream)              \
  CALL(cuStreamCreate, cu::Stream*, unsigned)                                                     \
  CALL(cuStreamCreateWithPriority, cu::Stream*, unsigned, int)                                    \
  CALL(cuStreamDestroy_v2, cu::Stream)                                                            \
  CALL(cuStreamSynchronize, cu::Stream)                                                           \
  CALL(cuStreamWaitEvent, cu::Stream, cu::Event, unsigned)                                        \
  CALL(cuEventCreate, cu::Event*, unsigned)                                                       \
  CALL(cuEventDestroy_v2, cu::Event)                                                              \
  CALL(cuEventRecord, cu::Event, cu::Stream)                                                      \
  CALL(cuEventQuery, cu::Event)                                                                   \
  CALL(cuEventSynchronize, cu::Event)                                                             \
  CALL(cuEventElapsedTime, float*, cu::Event, cu::Event)                                          \
  CALL(cuLaunchHostFunc, cu::Stream, cu::HostFunction, void*)

// A driver call that failed. After a `sticky` one the context is lost: every later call of the
// process on that device fails too, and what lay in its memory cannot be read any more.
class DriverError : public BackendError {
 public:
  DriverError(const char* call, cu::Result code, const std::string& name, const std::string& text,
              const std::string& doing);
  const char* call() const { return call_; }
  cu::Result code() const { return code_; }
  bool sticky() const { return is_sticky(code_); }
  bool out_of_memory() const { return code_ == cu::kOutOfMemory; }
  static bool is_sticky(cu::Result code);

 private:
  const char* call_;
  cu::Result code_;
};

// A loaded driver library. Calls are made as `driver.cuMemMap(...)` under check(), e.g.
//   driver.check("cuMemMap", driver.cuMemMap(...), "to map the arena");
class Driver {
 public:
  static constexpr const char* kSystemLibrary = "libcuda.so.1";

  // Loads and initialises the library. Throws BackendError that says why CUDA is not usable.
  static std::shared_ptr<const Driver> load(const std::string& library = kSystemLibrary);
  ~Driver();
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  // Throws DriverError unless the result is success. `doing` completes "... failed ".
  void check(const char* call, cu::Result result, const char* doing) const {
    if (result != cu::kSuccess) fail(call, result, doing);
  }
  std::string name_of(cu::Result result) const;

  int version() const { return version_; }  // as CUDA counts: 13000 is 13.0
  int device_count() const;

#define WATERFLOW_DECLARE(symbol, ...) cu::Result (*symbol)(__VA_ARGS__) = nullptr;
  WATERFLOW_DRIVER_CALLS(WATERFLOW_DECLARE)
#undef WATERFLOW_DECLARE

 private:
  explicit Driver(void* library) : library_(library) {}
  [[noreturn]] void fail(const char* call, cu::Result result, const char* doing) const;
  void resolve(const std::string& library);

  void* library_;
  int version_ = 0;
};

// Calls a driver function by its symbol and throws what went wrong.
#define WATERFLOW_CUDA(driver, symbol, doing, ...) \
  (driver).check(#symbol, (driver).symbol(__VA_ARGS__), doing)

}  // namespace waterflow
