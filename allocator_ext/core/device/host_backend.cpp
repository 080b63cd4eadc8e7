#include "core/device/host_backend.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "core/arena/types.h"

namespace waterflow {
namespace {

constexpr std::size_t kHugeFrom = std::size_t{16} << 20;  // below, huge pages would mostly waste

std::size_t page_bytes() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

std::size_t physical_memory() {
  const long pages = sysconf(_SC_PHYS_PAGES);
  return pages > 0 ? static_cast<std::size_t>(pages) * page_bytes() : 0;
}

void* map(std::size_t bytes) {
  return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
              -1, 0);
}

}  // namespace

HostBackend::HostBackend(std::size_t capacity)
    : capacity_(capacity), mapped_(std::max(capacity, physical_memory())), base_(map(mapped_)) {
  if (base_ == MAP_FAILED && mapped_ > capacity) {
    mapped_ = capacity;  // the process may not have so many addresses
    base_ = map(mapped_);
  }
  if (base_ == MAP_FAILED) {
    throw BackendError("cannot map " + std::to_string(capacity) + " bytes of host memory: " +
                       std::strerror(errno) + "; choose a smaller budget");
  }
  use_huge_pages();
}

HostBackend::~HostBackend() { munmap(base_, mapped_); }

// Only a hint: a kernel without huge pages refuses, and small pages serve as well.
void HostBackend::use_huge_pages() {
  if (capacity_ >= kHugeFrom) madvise(base_, capacity_, MADV_HUGEPAGE);
}

void HostBackend::give_back(std::size_t offset) {
  const std::size_t start = (offset + page_bytes() - 1) / page_bytes() * page_bytes();
  if (start < capacity_)
    madvise(static_cast<char*>(base_) + start, capacity_ - start, MADV_DONTNEED);
}

bool HostBackend::resize(std::size_t capacity) {
  if (capacity > mapped_) {
    // Without MREMAP_MAYMOVE: live tensors hold pointers, so the range grows in place or not.
    if (mremap(base_, mapped_, capacity, 0) == MAP_FAILED) return false;
    mapped_ = capacity;
  }
  if (capacity < capacity_) give_back(capacity);  // the system has it at once
  capacity_ = capacity;
  use_huge_pages();
  return true;
}

}  // namespace waterflow
