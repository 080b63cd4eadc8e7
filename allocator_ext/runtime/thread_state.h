#pragma once

#include <ATen/ThreadLocalState.h>
#include <ATen/autocast_mode.h>

#include <array>
#include <memory>

namespace waterflow {

// The types that autocast casts to, and whether it remembers casts: by thread, too, but no part of
// PyTorch's own state of a thread.
struct AutocastState {
  static constexpr std::array<at::DeviceType, 2> kDevices{at::kCPU, at::kCUDA};

  static AutocastState here() {
    AutocastState state;
    for (std::size_t i = 0; i < kDevices.size(); ++i) {
      state.types[i] = at::autocast::get_autocast_dtype(kDevices[i]);
    }
    state.remembers = at::autocast::is_autocast_cache_enabled();
    return state;
  }
  void set_here() const {
    for (std::size_t i = 0; i < kDevices.size(); ++i) {
      at::autocast::set_autocast_dtype(kDevices[i], types[i]);
    }
    at::autocast::set_autocast_cache_enabled(remembers);
  }

  std::array<at::ScalarType, kDevices.size()> types{};
  bool remembers = true;
};

// PyTorch's thread-local state as it is on the thread that makes this: dispatch keys (autocast
// among them), gradient and inference mode, function and dispatch modes, hooks for saved tensors.
class ThreadState {
 public:
  ThreadState()
      : state_(std::make_shared<at::ThreadLocalState>()), autocast_(AutocastState::here()) {}
  const at::ThreadLocalState& get() const { return *state_; }
  const AutocastState& autocast() const { return autocast_; }

 private:
  std::shared_ptr<at::ThreadLocalState> state_;
  AutocastState autocast_;
};

// While alive, the calling thread has that state.
class ThreadStateScope {
 public:
  explicit ThreadStateScope(const ThreadState& state)
      : guard_(state.get()), former_(AutocastState::here()) {
    state.autocast().set_here();
  }
  ~ThreadStateScope() { former_.set_here(); }
  ThreadStateScope(const ThreadStateScope&) = delete;
  ThreadStateScope& operator=(const ThreadStateScope&) = delete;

 private:
  at::ThreadLocalStateGuard guard_;
  AutocastState former_;
};

}  // namespace waterflow
