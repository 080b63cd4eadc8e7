#include "core/device/tier.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "core/arena/types.h"

namespace waterflow {
namespace {

// So short that who waits loses little by the piece that the copy lane is at.
constexpr std::size_t kPiece = std::size_t{1} << 20;
constexpr std::size_t kHugeFrom = std::size_t{16} << 20;

[[noreturn]] void cannot_map(std::size_t bytes, const std::string& where, int error) {
  throw BackendError("cannot spill " + std::to_string(bytes) + " bytes to " + where + ": " +
                     std::strerror(error));
}

// A file that has no name any more, with room for all of it: a full disk shows here, and not as a
// signal in the middle of a step.
int nameless_file(const std::string& folder, std::size_t bytes) {
  std::string name = folder + "/waterflow-spill-XXXXXX";
  std::vector<char> path(name.begin(), name.end());
  path.push_back('\0');
  const int file = mkstemp(path.data());
  if (file < 0) cannot_map(bytes, folder, errno);
  unlink(path.data());
  const int error = posix_fallocate(file, 0, static_cast<off_t>(bytes));
  if (error != 0) {
    close(file);
    cannot_map(bytes, folder, error);
  }
  return file;
}

}  // namespace

Copy::Copy(void* target, const void* source, std::size_t bytes)
    : target_(static_cast<char*>(target)),
      source_(static_cast<const char*>(source)),
      bytes_(bytes),
      pieces_((bytes + kPiece - 1) / kPiece) {}

void Copy::help() {
  for (std::size_t piece; (piece = next_.fetch_add(1)) < pieces_;) {
    const std::size_t start = piece * kPiece;
    std::memcpy(target_ + start, source_ + start, std::min(kPiece, bytes_ - start));
    done_.fetch_add(1, std::memory_order_acq_rel);
  }
}

std::shared_ptr<Tier> Tier::memory(std::size_t bytes) {
  bytes = std::max<std::size_t>(bytes, 1);
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) cannot_map(bytes, "ordinary memory", errno);
  if (bytes >= kHugeFrom) madvise(base, bytes, MADV_HUGEPAGE);
  return std::shared_ptr<Tier>(new Tier(base, bytes));
}

std::shared_ptr<Tier> Tier::file(const std::string& folder, std::size_t bytes) {
  bytes = std::max<std::size_t>(bytes, 1);
  const int file = nameless_file(folder, bytes);
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  const int error = errno;
  close(file);  // the mapping keeps it
  if (base == MAP_FAILED) cannot_map(bytes, folder, error);
  return std::shared_ptr<Tier>(new Tier(base, bytes));
}

Tier::Tier(void* base, std::size_t capacity)
    : base_(base), capacity_(capacity), lane_([this] { serve(); }) {}

Tier::~Tier() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  queued_.notify_all();
  lane_.join();
  munmap(base_, capacity_);
}

std::shared_ptr<Copy> Tier::copy(void* target, const void* source, std::size_t bytes) {
  auto copy = std::make_shared<Copy>(target, source, bytes);
  moved_.fetch_add(bytes);
  {
    std::lock_guard lock(mutex_);
    queue_.push_back(copy);
  }
  queued_.notify_one();
  return copy;
}

void Tier::wait(Copy& copy) {
  copy.help();
  if (copy.done()) return;
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [&] { return copy.done(); });
}

void Tier::serve() {
  std::unique_lock lock(mutex_);
  while (true) {
    queued_.wait(lock, [this] { return stop_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const std::shared_ptr<Copy> copy = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    copy->help();
    lock.lock();
    finished_.notify_all();
  }
}

}  // namespace waterflow
