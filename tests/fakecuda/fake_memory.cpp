// Physical memory as memory files, device addresses as reserved host addresses.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>

#include "fake_driver.h"

namespace fake {
namespace {

constexpr int kReservation = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

void* host_address(cu::DevicePointer pointer) { return reinterpret_cast<void*>(pointer); }

bool aligned(std::uint64_t value) { return value % kGranularity == 0; }

bool whole_granules(std::size_t bytes) { return bytes > 0 && aligned(bytes); }

bool on_device(const cu::Location& location) { return location.type == cu::kLocationDevice; }

bool plain(const cu::AllocationProperties* properties) {
  return properties != nullptr && properties->type == cu::kAllocationPinned &&
         properties->handle_types == 0 && on_device(properties->location);
}

// Reserves more than asked and gives back what lies before and after the aligned part.
void* reserve_aligned(std::size_t bytes, std::size_t alignment) {
  void* const raw = mmap(nullptr, bytes + alignment, PROT_NONE, kReservation, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  const auto begin = reinterpret_cast<std::uintptr_t>(raw);
  const std::uintptr_t base = (begin + alignment - 1) / alignment * alignment;
  if (base > begin) munmap(raw, base - begin);
  if (base < begin + alignment) munmap(host_address(base + bytes), begin + alignment - base);
  return host_address(base);
}

// Bytes from the pointer to the end of the reservation that it lies in; 0 if it lies in none.
std::size_t reserved_after(const Memory& memory, cu::DevicePointer pointer) {
  const auto after = memory.reservations.upper_bound(pointer);
  if (after == memory.reservations.begin()) return 0;
  const auto& [base, size] = *std::prev(after);
  return pointer - base < size ? size - (pointer - base) : 0;
}

bool touches_mapping(const Memory& memory, cu::DevicePointer pointer, std::size_t bytes) {
  const auto next = memory.mappings.lower_bound(pointer);
  if (next != memory.mappings.end() && next->first - pointer < bytes) return true;
  if (next == memory.mappings.begin()) return false;
  const auto& [base, mapping] = *std::prev(next);
  return pointer - base < mapping.bytes;
}

// The mappings that make up the range, neither cutting one nor leaving a gap; empty if they do not.
std::vector<cu::DevicePointer> whole_mappings(const Memory& memory, cu::DevicePointer pointer,
                                              std::size_t bytes) {
  std::vector<cu::DevicePointer> found;
  std::size_t covered = 0;
  while (covered < bytes) {
    const auto mapping = memory.mappings.find(pointer + covered);
    if (mapping == memory.mappings.end()) return {};
    found.push_back(mapping->first);
    covered += mapping->second.bytes;
  }
  return covered == bytes ? found : std::vector<cu::DevicePointer>();
}

// -1 for flags that the driver does not know.
int protection_of(const cu::AccessDescription& access) {
  constexpr int kRead = 1;
  if (access.flags == 0) return PROT_NONE;
  if (access.flags == kRead) return PROT_READ;
  return access.flags == cu::kAccessReadWrite ? PROT_READ | PROT_WRITE : -1;
}

}  // namespace

Physical::Physical(int file, cu::Device device, std::size_t bytes)
    : file(file), device(device), bytes(bytes) {
  state().memory.used[device] += bytes;
}

Physical::~Physical() {
  close(file);
  state().memory.used[device] -= bytes;
}

bool Memory::reserved(cu::DevicePointer pointer) const {
  return reserved_after(*this, pointer) > 0;
}

bool Memory::accessible(cu::DevicePointer pointer, std::size_t bytes, int protection) const {
  auto mapping = mappings.upper_bound(pointer);
  if (mapping == mappings.begin()) return false;
  --mapping;
  std::size_t skipped = pointer - mapping->first;
  std::size_t covered = 0;
  while (covered < bytes) {
    const bool continues =
        mapping != mappings.end() && mapping->first == pointer + covered - skipped;
    if (!continues || skipped >= mapping->second.bytes) return false;
    if ((mapping->second.protection & protection) != protection) return false;
    covered += mapping->second.bytes - skipped;
    skipped = 0;
    ++mapping;
  }
  return true;
}

}  // namespace fake

using namespace fake;

extern "C" {

cu::Result cuMemGetInfo_v2(std::size_t* free, std::size_t* total) {
  FAKE_CALL(kContext);
  const Memory& memory = state().memory;
  *total = memory.total;
  *free = memory.total - std::min(memory.total, memory.used[current_device()]);
  return cu::kSuccess;
}

cu::Result cuMemGetAllocationGranularity(std::size_t* granularity,
                                         const cu::AllocationProperties* properties, int option) {
  FAKE_CALL(kInit);
  constexpr int kRecommended = 1;
  if (!plain(properties) || option < 0 || option > kRecommended) return kInvalidValue;
  if (!state().valid(properties->location.id)) return kInvalidDevice;
  *granularity = kGranularity;
  return cu::kSuccess;
}

cu::Result cuMemAddressReserve(cu::DevicePointer* pointer, std::size_t bytes, std::size_t alignment,
                               cu::DevicePointer, unsigned long long flags) {
  FAKE_CALL(kInit);
  const bool power_of_two = (alignment & (alignment - 1)) == 0;
  if (!whole_granules(bytes) || !power_of_two || flags != 0) return kInvalidValue;
  void* const base = reserve_aligned(bytes, std::max(alignment, kGranularity));
  if (base == nullptr) return cu::kOutOfMemory;
  *pointer = reinterpret_cast<cu::DevicePointer>(base);
  state().memory.reservations[*pointer] = bytes;
  return cu::kSuccess;
}

cu::Result cuMemAddressFree(cu::DevicePointer pointer, std::size_t bytes) {
  FAKE_CALL(kInit);
  Memory& memory = state().memory;
  const auto found = memory.reservations.find(pointer);
  if (found == memory.reservations.end() || found->second != bytes) return kInvalidValue;
  if (touches_mapping(memory, pointer, bytes)) return kInvalidValue;
  munmap(host_address(pointer), bytes);
  memory.reservations.erase(found);
  return cu::kSuccess;
}

cu::Result cuMemCreate(cu::MemoryHandle* handle, std::size_t bytes,
                       const cu::AllocationProperties* properties, unsigned long long flags) {
  FAKE_CALL(kInit);
  if (!plain(properties) || !whole_granules(bytes) || flags != 0) return kInvalidValue;
  const cu::Device device = properties->location.id;
  if (!state().valid(device)) return kInvalidDevice;
  Memory& memory = state().memory;
  const std::size_t used = memory.used[device];
  if (used > memory.total || bytes > memory.total - used) return cu::kOutOfMemory;
  const int file = memfd_create("fake device memory", MFD_CLOEXEC);
  if (file < 0) return kOperatingSystem;
  const auto physical = std::make_shared<Physical>(file, device, bytes);
  if (ftruncate(file, static_cast<off_t>(bytes)) != 0) return kOperatingSystem;
  *handle = ++memory.last_handle;
  memory.handles.emplace(*handle, physical);
  return cu::kSuccess;
}

cu::Result cuMemRelease(cu::MemoryHandle handle) {
  FAKE_CALL(kInit);
  return state().memory.handles.erase(handle) == 1 ? cu::kSuccess : kInvalidValue;
}

cu::Result cuMemMap(cu::DevicePointer pointer, std::size_t bytes, std::size_t offset,
                    cu::MemoryHandle handle, unsigned long long flags) {
  FAKE_CALL(kInit);
  Memory& memory = state().memory;
  const auto found = memory.handles.find(handle);
  if (found == memory.handles.end() || offset != 0 || flags != 0) return kInvalidValue;
  if (!aligned(pointer) || !whole_granules(bytes)) return kInvalidValue;
  if (bytes > found->second->bytes) return kInvalidValue;
  if (bytes > reserved_after(memory, pointer)) return kInvalidValue;
  if (touches_mapping(memory, pointer, bytes)) return kInvalidValue;
  std::lock_guard<std::shared_mutex> alone(memory.in_use);
  void* const mapped =
      mmap(host_address(pointer), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, found->second->file, 0);
  if (mapped == MAP_FAILED) return kOperatingSystem;
  memory.mappings.emplace(pointer, Mapping{bytes, found->second, PROT_NONE});
  return cu::kSuccess;
}

// As on a device this does not wait for copies: those still queued find no memory and break the
// context.
cu::Result cuMemUnmap(cu::DevicePointer pointer, std::size_t bytes) {
  FAKE_CALL(kInit);
  Memory& memory = state().memory;
  const auto whole = whole_mappings(memory, pointer, bytes);
  if (whole.empty()) return kInvalidValue;
  std::lock_guard<std::shared_mutex> alone(memory.in_use);
  void* const reserved =
      mmap(host_address(pointer), bytes, PROT_NONE, kReservation | MAP_FIXED, -1, 0);
  if (reserved == MAP_FAILED) return kOperatingSystem;
  for (cu::DevicePointer base : whole) memory.mappings.erase(base);
  return cu::kSuccess;
}

cu::Result cuMemSetAccess(cu::DevicePointer pointer, std::size_t bytes,
                          const cu::AccessDescription* accesses, std::size_t count) {
  FAKE_CALL(kInit);
  Memory& memory = state().memory;
  const auto whole = whole_mappings(memory, pointer, bytes);
  if (whole.empty() || accesses == nullptr || count != 1) return kInvalidValue;
  if (!on_device(accesses->location)) return kInvalidValue;
  // The devices are no peers: none of them reaches another's memory.
  for (cu::DevicePointer base : whole) {
    const cu::Device owner = memory.mappings.at(base).physical->device;
    if (accesses->location.id != owner) return kInvalidDevice;
  }
  const int protection = protection_of(*accesses);
  if (protection < 0) return kInvalidValue;
  std::lock_guard<std::shared_mutex> alone(memory.in_use);
  if (mprotect(host_address(pointer), bytes, protection) != 0) return kOperatingSystem;
  for (cu::DevicePointer base : whole) memory.mappings.at(base).protection = protection;
  return cu::kSuccess;
}

cu::Result cuMemHostAlloc(void** pointer, std::size_t bytes, unsigned flags) {
  FAKE_CALL(kContext);
  constexpr unsigned kEveryFlag = 7;
  constexpr std::size_t kPage = 4096;
  if (bytes == 0 || flags > kEveryFlag) return kInvalidValue;
  *pointer = std::aligned_alloc(kPage, (bytes + kPage - 1) / kPage * kPage);
  if (*pointer == nullptr) return cu::kOutOfMemory;
  state().memory.host_blocks.emplace(*pointer, bytes);
  return cu::kSuccess;
}

// As the real one does in practice: what still copies from or to the block ends first.
cu::Result cuMemFreeHost(void* pointer) {
  FAKE_CALL(kContext);
  State& fake = state();
  if (fake.memory.host_blocks.count(pointer) == 0) return kInvalidValue;
  const cu::Result waited = synchronize_device(call.lock, current_device());
  if (waited != cu::kSuccess) return waited;
  if (fake.memory.host_blocks.erase(pointer) == 0) return kInvalidValue;
  std::free(pointer);
  return cu::kSuccess;
}

}  // extern "C"
