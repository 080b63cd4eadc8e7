// Ways round PyTorch's dispatcher that a tape takes, for operators of which it knows one: at every
// step of a tape most of what the dispatcher finds out, or what a kernel is written for, is the
// same.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <cstring>
#include <vector>

namespace waterflow {

// An instruction's own. It is taken where it has given the operator's bits: the first time the
// operator is called as well, and what comes of both is compared.
class Shortcut {
 public:
  using Stack = std::vector<c10::IValue>;
  virtual ~Shortcut() = default;

  // Calls the operator, whose arguments the stack holds.
  void run(const c10::OperatorHandle& handle, Stack& stack) {
    if (has_learnt_) return take(handle, stack);
    has_learnt_ = true;
    learn(handle, stack);
  }

 protected:
  // The first time.
  virtual void learn(const c10::OperatorHandle& handle, Stack& stack) = 0;
  // From then on.
  virtual void take(const c10::OperatorHandle& handle, Stack& stack) = 0;

 private:
  bool has_learnt_ = false;
};

// Whether two tensors on the host, of one layout without gaps, are equal.
inline bool same_bits(const at::Tensor& one, const at::Tensor& other) {
  return std::memcmp(one.const_data_ptr(), other.const_data_ptr(), one.nbytes()) == 0;
}

}  // namespace waterflow
