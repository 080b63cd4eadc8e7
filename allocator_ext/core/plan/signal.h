// Calls lanes back from what they do for long.
#pragma once

#include <atomic>
#include <cstdint>

namespace waterflow {

// A count that only grows, so that no call is lost: whoever sets out says how many calls he has
// seen to before.
class Signal {
 public:
  void call() { calls_.fetch_add(1, std::memory_order_release); }
  std::uint64_t calls() const { return calls_.load(std::memory_order_acquire); }

 private:
  std::atomic<std::uint64_t> calls_{0};
};

}  // namespace waterflow
