// Process-wide switches of torch's that change what a step computes.
#pragma once

#include <ATen/Context.h>

#include <array>
#include <optional>

#include "account/checks.h"

namespace waterflow {

// Those that torch keeps outside of Python, as they are now.
struct Flags {
  static Flags now();
  bool operator==(const Flags&) const = default;

  c10::ScalarType dtype;
  bool deterministic, warns_only, fills, finds_anomalies, looks_for_nan;
  at::Float32MatmulPrecision precision;
  bool flash, memory_efficient, math, cudnn_attention, overrideable, reduced_math;
  bool mkldnn, mkldnn_deterministic, nnpack, reduced_fp16;
  bool cudnn, cudnn_benchmark, cudnn_deterministic, cudnn_tf32;
  at::LinalgBackend linalg;
  at::QEngine quantized;
  std::optional<bool> sparse_invariants;
  std::array<at::SDPBackend, at::num_sdp_backends> order;  // of kinds of attention
};

// These switches, and what a function says about methods of a class that users may replace: asked
// when the class has changed, which its version tells.
class FlagsCheck final : public Check {
 public:
  FlagsCheck(PyTypeObject* type, PyObject* function, PyObject* expected);
  bool holds(Part* part) override;

 private:
  bool is_as_it_was() const;

  Flags flags_;
  PyTypeObject* type_;
  PyObject* function_;
  PyObject* expected_;
  unsigned tag_ = 0;  // of the class when the function was last asked
};

}  // namespace waterflow
