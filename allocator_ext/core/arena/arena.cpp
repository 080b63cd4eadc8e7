#include "core/arena/arena.h"

#include <algorithm>
#include <string>
#include <utility>

namespace waterflow {
namespace {

using Lock = std::lock_guard<PatientMutex>;

// Virtual addresses start where no mapping can be, so that one used by mistake faults at once, and
// offset 0 differs from nullptr.
constexpr std::uintptr_t kVirtualBase = std::uintptr_t{1} << 60;

std::size_t whole_units(std::size_t capacity, std::size_t alignment) {
  return capacity - capacity % alignment;
}

Options with_capacity(Options options, std::size_t capacity) {
  options.capacity = capacity;
  return options;
}

}  // namespace

Arena::Arena(std::unique_ptr<Backend> backend, Options options, TensorKind tensors)
    : backend_(std::move(backend)),
      base_(backend_->base() ? reinterpret_cast<std::uintptr_t>(backend_->base()) : kVirtualBase),
      allocator_(with_capacity(options, backend_->capacity())),
      tensors_(tensors),
      capacity_(allocator_.capacity()) {
  allocator_.set_sync_hook([this] { backend_->synchronize(); });
}

void* Arena::granted(std::size_t offset, JobId job) {
  timeline_.add(job, allocator_.held(job));
  fixed_changed();
  return pointer_to(offset);
}

void Arena::close_plan(JobId job, std::size_t peak, std::size_t extent,
                       const std::vector<std::pair<double, std::size_t>>& samples) {
  Lock lock(mutex_);
  if (static_cast<std::size_t>(job) >= planned_job_peaks_.size()) {
    planned_job_peaks_.resize(job + 1);
  }
  planned_job_peaks_[job] = std::max(planned_job_peaks_[job], peak);
  planned_extent_ = std::max(planned_extent_, extent);
  for (const auto& [seconds, held] : samples) timeline_.add_at(seconds, job, held);
}

void* Arena::allocate(std::size_t bytes, Lane lane, JobId job, bool may_sync) {
  Lock lock(mutex_);
  std::optional<std::size_t> offset = allocator_.allocate(bytes, lane, job, may_sync);
  if (!offset && growth_ > 0) {
    const std::size_t before = allocator_.capacity();
    const std::size_t needed = allocator_.rounded(bytes);
    if (resize_locked(before + std::max(growth_, needed)) || resize_locked(before + needed)) {
      offset = allocator_.allocate(bytes, lane, job, may_sync);
    }
  }
  return offset ? granted(*offset, job) : nullptr;
}

void* Arena::allocate_at(std::size_t offset, std::size_t bytes, Lane lane, JobId job) {
  Lock lock(mutex_);
  return allocator_.allocate_at(offset, bytes, lane, job) ? granted(offset, job) : nullptr;
}

void Arena::use(const void* pointer, Lane lane) {
  const std::size_t offset = offset_of(pointer);
  Lock lock(mutex_);
  allocator_.use(offset, lane);
}

void Arena::free(void* pointer, Lane lane) {
  const std::size_t offset = offset_of(pointer);
  Lock lock(mutex_);
  const JobId job = allocator_.free(offset, lane);
  timeline_.add(job, allocator_.held(job));
  fixed_changed();
}

void Arena::synchronize() {
  Lock lock(mutex_);
  backend_->synchronize();
  allocator_.synchronize();
}

void Arena::finish() { backend_->finish(); }

void Arena::copy(void* target, const void* source, std::size_t bytes) {
  backend_->copy(target, source, bytes);
}

void Arena::copy_all(const std::vector<CopyOf>& copies) { backend_->copy_all(copies); }

void Arena::commit() {
  Lock lock(mutex_);
  backend_->commit();
}

void Arena::give_back() {
  Lock lock(mutex_);
  backend_->give_back(allocator_.live_end());
}

void Arena::set_growth(std::size_t step) {
  Lock lock(mutex_);
  growth_ = step;
}

std::size_t Arena::offset_of(const void* pointer) const {
  if (owns(pointer)) return reinterpret_cast<std::uintptr_t>(pointer) - base_;
  throw UnknownChunk("the pointer " + std::to_string(reinterpret_cast<std::uintptr_t>(pointer)) +
                     " is not of this arena");
}

std::optional<Chunk> Arena::find(const void* pointer) const {
  if (!owns(pointer)) return std::nullopt;
  Lock lock(mutex_);
  return allocator_.find(offset_of(pointer));
}

bool Arena::resize(std::size_t capacity) {
  Lock lock(mutex_);
  return resize_locked(capacity);
}

bool Arena::resize_locked(std::size_t capacity) {
  capacity = whole_units(capacity, allocator_.alignment());
  const std::size_t before = allocator_.capacity();
  // No offset may lie outside the memory: it grows first, and shrinks last.
  if (capacity > before) {
    if (!backend_->resize(capacity)) return false;
    allocator_.resize(capacity);
  } else {
    if (!allocator_.resize(capacity)) return false;
    if (!backend_->resize(capacity)) {
      allocator_.resize(before);
      return false;
    }
  }
  capacity_.store(capacity, std::memory_order_relaxed);
  return true;
}

void Arena::set_limit(JobId job, std::size_t bytes) {
  Lock lock(mutex_);
  allocator_.set_limit(job, bytes);
}

std::size_t Arena::limit(JobId job) const {
  Lock lock(mutex_);
  return allocator_.limit(job);
}

std::size_t Arena::held(JobId job) const {
  Lock lock(mutex_);
  return allocator_.held(job);
}

std::size_t Arena::peak(JobId job) const {
  Lock lock(mutex_);
  const bool planned = static_cast<std::size_t>(job) < planned_job_peaks_.size();
  return std::max(allocator_.peak(job), planned ? planned_job_peaks_[job] : 0);
}

Statistics Arena::statistics() const {
  Lock lock(mutex_);
  const std::size_t planned = live_bytes_.planned();
  return {allocator_.capacity(),
          backend_->taken(),
          allocator_.live() + planned,
          live_bytes_.peak(),
          std::max(allocator_.extent(), planned_extent_),
          allocator_.free_bytes() - planned,
          allocator_.largest_free(),
          allocator_.allocations(),
          allocator_.forced_syncs(),
          allocator_.explicit_syncs()};
}

void Arena::reset_peaks() {
  Lock lock(mutex_);
  allocator_.reset_peaks();
  live_bytes_.reset_peak();
  planned_extent_ = 0;
  planned_job_peaks_.clear();
}

std::size_t Arena::live_end() const {
  Lock lock(mutex_);
  return allocator_.live_end();
}

std::uint64_t Arena::version() const {
  Lock lock(mutex_);
  return allocator_.version();
}

Allocator Arena::snapshot() const {
  Lock lock(mutex_);
  return allocator_;
}

void Arena::record(bool on) {
  Lock lock(mutex_);
  allocator_.record(on);
}

void Arena::note(EventKind kind, Lane lane, std::size_t offset, std::size_t bytes) {
  Lock lock(mutex_);
  allocator_.note(kind, lane, offset, bytes);
}

std::vector<Event> Arena::take_log() {
  Lock lock(mutex_);
  return allocator_.take_log();
}

Timeline Arena::timeline() const {
  Lock lock(mutex_);
  return timeline_;
}

void Arena::enable_timeline(bool on) {
  Lock lock(mutex_);
  timeline_.enable(on);
}

void Arena::clear_timeline() {
  Lock lock(mutex_);
  timeline_.clear();
}

}  // namespace waterflow
