#include "core/device/host_backend.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "core/arena/types.h"

namespace waterflow {
namespace {

constexpr std::size_t kHugeFrom = std::size_t{16} << 20;  // below, huge pages would mostly waste

}  // namespace

HostBackend::HostBackend(std::size_t capacity) : capacity_(capacity) {
  base_ = mmap(nullptr, capacity, PROT_READ | PROT_WRITE,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base_ == MAP_FAILED) {
    throw BackendError("cannot map " + std::to_string(capacity) + " bytes of host memory: " +
                       std::strerror(errno) + "; choose a smaller budget");
  }
  // Only a hint: a kernel without huge pages refuses, and small pages serve as well.
  if (capacity >= kHugeFrom) madvise(base_, capacity, MADV_HUGEPAGE);
}

HostBackend::~HostBackend() { munmap(base_, capacity_); }

void HostBackend::give_back(std::size_t offset) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t start = (offset + page - 1) / page * page;
  if (start < capacity_)
    madvise(static_cast<char*>(base_) + start, capacity_ - start, MADV_DONTNEED);
}

bool HostBackend::resize(std::size_t capacity) {
  // Without MREMAP_MAYMOVE: live tensors hold pointers, so the range grows in place or not at all.
  if (mremap(base_, capacity_, capacity, 0) == MAP_FAILED) return false;
  capacity_ = capacity;
  return true;
}

}  // namespace waterflow
