#include "cuda/recorded_streams.h"

#include <c10/core/Event.h>

#include <algorithm>
#include <utility>

namespace waterflow {

void RecordedStreams::add(const void* block, c10::Stream stream) {
  std::lock_guard lock(mutex_);
  auto& streams = streams_[block];
  if (std::find(streams.begin(), streams.end(), stream) == streams.end()) streams.push_back(stream);
  blocks_.store(streams_.size(), std::memory_order_relaxed);
}

// A block is freed after it was recorded, by whatever order its owners have; that order makes the
// count visible, too.
std::vector<c10::Stream> RecordedStreams::take(const void* block) {
  if (blocks_.load(std::memory_order_relaxed) == 0) return {};
  std::lock_guard lock(mutex_);
  auto found = streams_.find(block);
  if (found == streams_.end()) return {};
  auto streams = std::move(found->second);
  streams_.erase(found);
  blocks_.store(streams_.size(), std::memory_order_relaxed);
  return streams;
}

void put_after(const std::vector<c10::Stream>& streams, std::optional<c10::Stream> later) {
  for (const c10::Stream& stream : streams) {
    if (stream == later) continue;
    c10::Event event(stream.device_type());
    event.record(stream);
    if (later) {
      event.block(*later);
    } else {
      event.synchronize();
    }
  }
}

}  // namespace waterflow
