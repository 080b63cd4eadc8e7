#pragma once

#include <ATen/ThreadLocalState.h>

#include <memory>

namespace waterflow {

// PyTorch's thread-local state as it is on the thread that makes this: dispatch keys (autocast
// among them), gradient and inference mode, function and dispatch modes, hooks for saved tensors.
class ThreadState {
 public:
  ThreadState() : state_(std::make_shared<at::ThreadLocalState>()) {}
  const at::ThreadLocalState& get() const { return *state_; }

 private:
  std::shared_ptr<at::ThreadLocalState> state_;
};

// While alive, the calling thread has that state.
class ThreadStateScope {
 public:
  explicit ThreadStateScope(const ThreadState& state) : guard_(state.get()) {}

 private:
  at::ThreadLocalStateGuard guard_;
};

}  // namespace waterflow
