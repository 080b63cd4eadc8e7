// Which streams use a lane's block beside the lane itself: what Tensor.record_stream is told.
#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <cstddef>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

namespace waterflow {

class RecordedStreams {
 public:
  void add(const void* block, c10::Stream stream);
  // The block's streams, which are forgotten. Costs one load while no block has any.
  std::vector<c10::Stream> take(const void* block);

 private:
  std::atomic<std::size_t> blocks_{0};  // in the map, for those without the lock
  std::mutex mutex_;                    // guards the map
  std::unordered_map<const void*, std::vector<c10::Stream>> streams_;
};

// What is queued on `later` from now on comes after what these streams have queued so far. Without
// `later` the host waits, and with it whatever anybody queues from now on.
void put_after(const std::vector<c10::Stream>& streams, std::optional<c10::Stream> later);

}  // namespace waterflow
