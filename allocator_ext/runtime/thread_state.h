#pragma once

#include <ATen/Parallel.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/autocast_mode.h>
#include <c10/core/AutogradState.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

namespace waterflow {

// The types that autocast casts to, and whether it remembers casts: by thread, too, but no part of
// PyTorch's own state of a thread.
struct AutocastState {
  friend bool operator==(const AutocastState&, const AutocastState&) = default;
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

// What the calling thread computes with, where numbers may depend on it.
struct ThreadSettings {
  // PyTorch tells of denormals to nobody: one is made. And of autocast only to those who enter and
  // leave it.
  static ThreadSettings here() {
    const volatile double least = std::numeric_limits<double>::min();
    at::autocast::increment_nesting();
    return {at::get_num_threads(), least * 0.5 == 0.0, at::autocast::decrement_nesting()};
  }
  friend bool operator==(const ThreadSettings&, const ThreadSettings&) = default;

  int intra_op = 0;      // intra-op threads
  bool flushes = false;  // whether it takes denormal numbers for zero
  int autocasts = 0;     // how many contexts of autocast it is in
};

// What of the calling thread's state code enters and leaves: to be compared, with the
// interpreter's lock, before the objects that it knows by their addresses can be gone.
class ThreadModes {
 public:
  ThreadModes() {
    const c10::AutogradState& autograd = c10::AutogradState::get_tls_state();
    gradients_ = {autograd.get_grad_mode(), autograd.get_inference_mode(),
                  autograd.get_fw_grad_mode(), autograd.get_multithreading_enabled(),
                  autograd.get_view_replay_enabled()};
    for (std::size_t i = 0; i < casts_.size(); ++i) {
      casts_[i] = at::autocast::is_autocast_enabled(AutocastState::kDevices[i]);
    }
    for (std::int64_t i = 0; i < at::impl::PythonTorchFunctionTLS::stack_len(); ++i) {
      note(*at::impl::PythonTorchFunctionTLS::get_stack_at(i));
    }
    entered_.push_back(nullptr);
    for (std::int64_t i = 0; i < c10::impl::TorchDispatchModeTLS::stack_len(); ++i) {
      note(*c10::impl::TorchDispatchModeTLS::get_stack_at(i));
    }
    entered_.push_back(nullptr);
    const auto& hooks = at::SavedTensorDefaultHooks::get_tls_state();
    if (!hooks.stack.empty()) {
      note(hooks.stack.top().first);
      note(hooks.stack.top().second);
    }
    saving_ = {hooks.stack.size(), hooks.disabled_error_message.has_value(), hooks.is_tracing};
  }
  friend bool operator==(const ThreadModes&, const ThreadModes&) = default;

 private:
  template <typename Object>
  void note(const Object& object) {
    entered_.push_back(object.ptr(&object.pyinterpreter()));
  }

  AutocastState autocast_ = AutocastState::here();
  std::array<bool, 5> gradients_{};
  std::array<bool, AutocastState::kDevices.size()> casts_{};
  std::array<std::size_t, 3> saving_{};
  std::vector<const void*> entered_;  // modes of functions, of dispatch; hooks for saved tensors
};

}  // namespace waterflow
