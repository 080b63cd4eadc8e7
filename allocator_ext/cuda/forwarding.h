// A CUDA allocator that does nothing itself: every call goes to another one.
#pragma once

#include <c10/core/Stream.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <unordered_set>
#include <utility>
#include <vector>

namespace waterflow {

// The interface grows with PyTorch's releases. Members that torch 2.11 does not have yet stand at
// the end without `override`: where the base class has them they override all the same, and where
// it has not nobody can call them. Their types are written out, and the call to the inner allocator
// is only compiled if it exists, so that one text serves every release from 2.11 on.
template <typename Result, typename Inner, typename Call>
Result forward_if_known(Inner& inner, Call call) {
  if constexpr (std::is_invocable_v<Call, Inner&>) {
    return call(inner);
  } else {
    return Result();
  }
}

class ForwardingAllocator : public c10::cuda::CUDACachingAllocator::CUDAAllocator {
 public:
  using Inner = c10::cuda::CUDACachingAllocator::CUDAAllocator;
  using Device = c10::DeviceIndex;
  using Pool = c10::MempoolId_t;
  using DeviceStats = c10::CachingDeviceAllocator::DeviceStats;
  using Observer = std::function<void(std::int64_t, std::size_t, std::size_t, std::size_t)>;
  using AllocatorState = c10::cuda::CUDACachingAllocator::AllocatorState;

  explicit ForwardingAllocator(Inner& inner) : inner_(inner) {}

  // c10::Allocator
  c10::DataPtr allocate(std::size_t bytes) override { return inner_.allocate(bytes); }
  bool is_simple_data_ptr(const c10::DataPtr& data) const override {
    return inner_.is_simple_data_ptr(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return inner_.raw_deleter(); }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    inner_.copy_data(target, source, bytes);
  }

  // c10::DeviceAllocator
  bool initialized() override { return inner_.initialized(); }
  void emptyCache(Pool pool = {0, 0}) override { inner_.emptyCache(pool); }
  DeviceStats getDeviceStats(Device device) override { return inner_.getDeviceStats(device); }
  void resetAccumulatedStats(Device device) override { inner_.resetAccumulatedStats(device); }
  void resetPeakStats(Device device) override { inner_.resetPeakStats(device); }
  std::pair<std::size_t, std::size_t> getMemoryInfo(Device device) override {
    return inner_.getMemoryInfo(device);
  }

  // CUDAAllocator
  void* raw_alloc(std::size_t bytes) override { return inner_.raw_alloc(bytes); }
  void* raw_alloc_with_stream(std::size_t bytes, cudaStream_t stream) override {
    return inner_.raw_alloc_with_stream(bytes, stream);
  }
  void raw_delete(void* pointer) override { inner_.raw_delete(pointer); }
  void init(int device_count) override { inner_.init(device_count); }
  double getMemoryFraction(Device device) override { return inner_.getMemoryFraction(device); }
  void setMemoryFraction(double fraction, Device device) override {
    inner_.setMemoryFraction(fraction, device);
  }
  std::vector<c10::cuda::CUDACachingAllocator::StreamSegmentSize> getExpandableSegmentSizes(
      Device device) override {
    return inner_.getExpandableSegmentSizes(device);
  }
  void enable(bool value) override { inner_.enable(value); }
  bool isEnabled() const override { return inner_.isEnabled(); }
  void cacheInfo(Device device, std::size_t* largest) override {
    inner_.cacheInfo(device, largest);
  }
  void* getBaseAllocation(void* pointer, std::size_t* bytes) override {
    return inner_.getBaseAllocation(pointer, bytes);
  }
  using Inner::recordStream;
  void recordStream(const c10::DataPtr& data, c10::cuda::CUDAStream stream) override {
    inner_.recordStream(data, stream);
  }
  c10::cuda::CUDACachingAllocator::SnapshotInfo snapshot(Pool pool = {0, 0},
                                                         bool include_traces = true) override {
    return inner_.snapshot(pool, include_traces);
  }
  void beginAllocateToPool(Device device, Pool pool,
                           std::function<bool(cudaStream_t)> filter) override {
    inner_.beginAllocateToPool(device, pool, std::move(filter));
  }
  void endAllocateToPool(Device device, Pool pool) override {
    inner_.endAllocateToPool(device, pool);
  }
  void releasePool(Device device, Pool pool) override { inner_.releasePool(device, pool); }
  int getPoolUseCount(Device device, Pool pool) override {
    return inner_.getPoolUseCount(device, pool);
  }
  void createOrIncrefPool(Device device, Pool pool,
                          std::shared_ptr<Inner> allocator = nullptr) override {
    inner_.createOrIncrefPool(device, pool, std::move(allocator));
  }
  void setUseOnOOM(Device device, Pool pool, bool use_on_oom) override {
    inner_.setUseOnOOM(device, pool, use_on_oom);
  }
  void setNoSplit(Device device, Pool pool) override { inner_.setNoSplit(device, pool); }
  bool checkPoolLiveAllocations(Device device, Pool pool,
                                const std::unordered_set<void*>& expected) override {
    return inner_.checkPoolLiveAllocations(device, pool, expected);
  }
  c10::cuda::CUDACachingAllocator::ShareableHandle shareIpcHandle(void* pointer) override {
    return inner_.shareIpcHandle(pointer);
  }
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override {
    return inner_.getIpcDevPtr(std::move(handle));
  }
  bool isHistoryEnabled() override { return inner_.isHistoryEnabled(); }
  void recordHistory(bool enabled, c10::CachingDeviceAllocator::CreateContextFn recorder,
                     std::size_t max_entries, c10::CachingDeviceAllocator::RecordContext when,
                     bool clear, const std::vector<std::string>& skipped) override {
    inner_.recordHistory(enabled, recorder, max_entries, when, clear, skipped);
  }
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& notes) override {
    inner_.recordAnnotation(notes);
  }
  void pushCompileContext(std::string& context) override { inner_.pushCompileContext(context); }
  void popCompileContext() override { inner_.popCompileContext(); }
  void setUserMetadata(const std::string& metadata) override { inner_.setUserMetadata(metadata); }
  std::string getUserMetadata() override { return inner_.getUserMetadata(); }
  void attachOutOfMemoryObserver(Observer observer) override {
    inner_.attachOutOfMemoryObserver(std::move(observer));
  }
  void attachAllocatorTraceTracker(
      c10::CachingDeviceAllocator::AllocatorTraceTracker tracker) override {
    inner_.attachAllocatorTraceTracker(std::move(tracker));
  }
  void enablePeerAccess(Device device, Device peer) override {
    inner_.enablePeerAccess(device, peer);
  }
  cudaError_t memcpyAsync(void* target, int target_device, const void* source, int source_device,
                          std::size_t bytes, cudaStream_t stream, bool peer_access) override {
    return inner_.memcpyAsync(target, target_device, source, source_device, bytes, stream,
                              peer_access);
  }
  std::shared_ptr<AllocatorState> getCheckpointState(Device device, Pool pool) override {
    return inner_.getCheckpointState(device, pool);
  }
  c10::cuda::CUDACachingAllocator::CheckpointDelta setCheckpointPoolState(
      Device device, std::shared_ptr<AllocatorState> state) override {
    return inner_.setCheckpointPoolState(device, std::move(state));
  }
  // The inner one's: code asks whether it is "native" before it uses what only that has.
  std::string name() override { return inner_.name(); }

  // Since torch 2.12
  void attachOomRejectionObserver(Observer observer) {
    forward_if_known<void>(
        inner_,
        [&](auto& inner) -> decltype(inner.attachOomRejectionObserver(std::move(observer))) {
          return inner.attachOomRejectionObserver(std::move(observer));
        });
  }
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* pointer) {
    return forward_if_known<std::shared_ptr<c10::GatheredContext>>(
        inner_, [&](auto& inner) -> decltype(inner.getContextForPointer(pointer)) {
          return inner.getContextForPointer(pointer);
        });
  }

  // Since torch 2.13
  void markCaptureBegin(Device device) {
    forward_if_known<void>(inner_, [&](auto& inner) -> decltype(inner.markCaptureBegin(device)) {
      return inner.markCaptureBegin(device);
    });
  }
  void markCaptureEnd(Device device) {
    forward_if_known<void>(inner_, [&](auto& inner) -> decltype(inner.markCaptureEnd(device)) {
      return inner.markCaptureEnd(device);
    });
  }
  c10::DataPtr allocateWithAddress(std::size_t bytes, void* address) {
    return forward_if_known<c10::DataPtr>(
        inner_, [&](auto& inner) -> decltype(inner.allocateWithAddress(bytes, address)) {
          return inner.allocateWithAddress(bytes, address);
        });
  }

  // Since torch 2.14
  bool supportsUserMetadata() {
    return forward_if_known<bool>(inner_,
                                  [](auto& inner) -> decltype(inner.supportsUserMetadata()) {
                                    return inner.supportsUserMetadata();
                                  });
  }
  void annotateMemory(const void* pointer, const std::string& metadata) {
    forward_if_known<void>(inner_,
                           [&](auto& inner) -> decltype(inner.annotateMemory(pointer, metadata)) {
                             return inner.annotateMemory(pointer, metadata);
                           });
  }

 protected:
  Inner& inner_;
};

}  // namespace waterflow
