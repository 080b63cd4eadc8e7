// core/device/driver.h writes out types, constants and signatures of cuda.h. Here the two are
// compared, at compile time; the main function compares the list of errors that end a context. Only
// declarations of cuda.h are used, so nothing of CUDA is linked.

// Before cuda.h, whose macros rename some functions.
#include "core/device/driver.h"
//
#include <cuda.h>

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <type_traits>

namespace {

namespace cu = waterflow::cu;
using waterflow::DriverError;

// Handles are pointers to classes with other names, and enumerations are ints in driver.h: what has
// to agree is what a register or a memory cell holds.
template <typename Type>
constexpr bool number = std::is_arithmetic_v<Type> || std::is_enum_v<Type>;

template <typename Ours, typename Theirs>
constexpr bool same_value() {
  using OurTarget = std::remove_pointer_t<Ours>;
  using TheirTarget = std::remove_pointer_t<Theirs>;
  if constexpr (std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>) {
    return std::is_const_v<OurTarget> == std::is_const_v<TheirTarget> &&
           same_value<std::remove_cv_t<OurTarget>, std::remove_cv_t<TheirTarget>>();
  } else if constexpr (number<Ours> && number<Theirs>) {
    return sizeof(Ours) == sizeof(Theirs) &&
           std::is_floating_point_v<Ours> == std::is_floating_point_v<Theirs>;
  } else {
    return std::is_pointer_v<Ours> == std::is_pointer_v<Theirs> && number<Ours> == number<Theirs> &&
           std::is_void_v<Ours> == std::is_void_v<Theirs> &&
           std::is_class_v<Ours> == std::is_class_v<Theirs> &&
           std::is_function_v<Ours> == std::is_function_v<Theirs>;
  }
}

template <typename OurResult, typename... Ours, typename TheirResult, typename... Theirs>
constexpr bool agree(OurResult (*)(Ours...), TheirResult (*)(Theirs...)) {
  if constexpr (sizeof...(Ours) != sizeof...(Theirs)) {
    return false;
  } else {
    return same_value<OurResult, TheirResult>() && (same_value<Ours, Theirs>() && ...);
  }
}

// The comparison itself has to be able to fail.
template <typename... Parameters>
using Function = CUresult (*)(Parameters...);
constexpr Function<int*, CUstream> kSample = nullptr;
static_assert(agree(Function<int*, cu::Stream>(), kSample));
static_assert(!agree(Function<int*>(), kSample));
static_assert(!agree(Function<cu::Stream, int*>(), kSample));
static_assert(!agree(Function<long long*, cu::Stream>(), kSample));
static_assert(!agree(Function<const int*, cu::Stream>(), kSample));
static_assert(!agree(Function<int**, cu::Stream>(), kSample));
static_assert(!agree(Function<float*, cu::Stream>(), kSample));
static_assert(!agree(Function<int*, long long>(), kSample));

#define CHECK_CALL(symbol, ...)                                                    \
  static_assert(agree(static_cast<cu::Result (*)(__VA_ARGS__)>(nullptr),           \
                      static_cast<std::add_pointer_t<decltype(symbol)>>(nullptr)), \
                #symbol " has another signature in cuda.h");
WATERFLOW_DRIVER_CALLS(CHECK_CALL)
#undef CHECK_CALL

static_assert(same_value<cu::Result, CUresult>());
static_assert(same_value<cu::Device, CUdevice>());
static_assert(same_value<cu::DevicePointer, CUdeviceptr>());
static_assert(same_value<cu::MemoryHandle, CUmemGenericAllocationHandle>());
static_assert(same_value<cu::HostFunction, CUhostFn>());
static_assert(same_value<cu::Context, CUcontext>());
static_assert(same_value<cu::Stream, CUstream>());
static_assert(same_value<cu::Event, CUevent>());

#define CHECK_SIZE(ours, theirs) \
  static_assert(sizeof(ours) == sizeof(theirs) && alignof(ours) == alignof(theirs))
#define CHECK_FIELD(ours, field, theirs, their_field)                     \
  static_assert(offsetof(ours, field) == offsetof(theirs, their_field) && \
                sizeof(ours::field) == sizeof(theirs::their_field))
#define CHECK_FLAG(field, their_field)                                       \
  static_assert(offsetof(cu::AllocationProperties, flags.field) ==           \
                    offsetof(CUmemAllocationProp, allocFlags.their_field) && \
                sizeof(cu::AllocationProperties::flags.field) ==             \
                    sizeof(CUmemAllocationProp::allocFlags.their_field))

CHECK_SIZE(cu::Location, CUmemLocation);
CHECK_FIELD(cu::Location, type, CUmemLocation, type);
CHECK_FIELD(cu::Location, id, CUmemLocation, id);

CHECK_SIZE(cu::AccessDescription, CUmemAccessDesc);
CHECK_FIELD(cu::AccessDescription, location, CUmemAccessDesc, location);
CHECK_FIELD(cu::AccessDescription, flags, CUmemAccessDesc, flags);

CHECK_SIZE(cu::AllocationProperties, CUmemAllocationProp);
CHECK_FIELD(cu::AllocationProperties, type, CUmemAllocationProp, type);
CHECK_FIELD(cu::AllocationProperties, handle_types, CUmemAllocationProp, requestedHandleTypes);
CHECK_FIELD(cu::AllocationProperties, location, CUmemAllocationProp, location);
CHECK_FIELD(cu::AllocationProperties, win32_meta_data, CUmemAllocationProp, win32HandleMetaData);
CHECK_FIELD(cu::AllocationProperties, flags, CUmemAllocationProp, allocFlags);
CHECK_FLAG(compression, compressionType);
CHECK_FLAG(gpu_direct_rdma, gpuDirectRDMACapable);
CHECK_FLAG(usage, usage);
CHECK_FLAG(reserved, reserved);

static_assert(cu::kSuccess == CUDA_SUCCESS);
static_assert(cu::kOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY);
static_assert(cu::kNotReady == CUDA_ERROR_NOT_READY);
static_assert(cu::kAllocationPinned == CU_MEM_ALLOCATION_TYPE_PINNED);
static_assert(cu::kLocationDevice == CU_MEM_LOCATION_TYPE_DEVICE);
static_assert(cu::kAccessReadWrite == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
static_assert(cu::kGranularityMinimum == CU_MEM_ALLOC_GRANULARITY_MINIMUM);
static_assert(cu::kStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(cu::kEventDefault == CU_EVENT_DEFAULT);
static_assert(cu::kEventDisableTiming == CU_EVENT_DISABLE_TIMING);
static_assert(cu::kAttributeVirtualMemory ==
              CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);

// Errors after which, by the comments in cuda.h, the context or the process cannot go on.
constexpr int kEnding[] = {
    CUDA_ERROR_DEINITIALIZED,
    CUDA_ERROR_ECC_UNCORRECTABLE,
    CUDA_ERROR_NVLINK_UNCORRECTABLE,
    CUDA_ERROR_ILLEGAL_ADDRESS,
    CUDA_ERROR_LAUNCH_TIMEOUT,
    CUDA_ERROR_CONTEXT_IS_DESTROYED,
    CUDA_ERROR_ASSERT,
    CUDA_ERROR_HARDWARE_STACK_ERROR,
    CUDA_ERROR_ILLEGAL_INSTRUCTION,
    CUDA_ERROR_MISALIGNED_ADDRESS,
    CUDA_ERROR_INVALID_ADDRESS_SPACE,
    CUDA_ERROR_INVALID_PC,
    CUDA_ERROR_LAUNCH_FAILED,
    CUDA_ERROR_EXTERNAL_DEVICE,
    CUDA_ERROR_UNKNOWN,
#if CUDA_VERSION >= 13000  // some older headers do not have them
    CUDA_ERROR_CONTAINED,
    CUDA_ERROR_TENSOR_MEMORY_LEAK,
#else
    226,
    721,
#endif
};

// Differences between driver.cpp's list and the one above.
int unlike(int first, int last) {
  int differences = 0;
  for (int code = first; code <= last; ++code) {
    const bool ending =
        std::find(std::begin(kEnding), std::end(kEnding), code) != std::end(kEnding);
    // A server of MPS ends its clients; nothing here needs to tell that apart.
    if (ending == DriverError::is_sticky(code) || code == CUDA_ERROR_MPS_CLIENT_TERMINATED)
      continue;
    std::printf("abi: error %d is %ssticky by cuda.h\n", code, ending ? "" : "not ");
    ++differences;
  }
  return differences;
}

}  // namespace

int main() {
  if (unlike(-10, 10'000) > 0) return 1;
  std::puts("abi: ok");
}
