#include "account/flags.h"

#include <c10/core/DefaultDtype.h>
#include <torch/csrc/autograd/anomaly_mode.h>

namespace py = pybind11;

namespace waterflow {

Flags Flags::now() {
  at::Context& context = at::globalContext();
  return {c10::get_default_dtype_as_scalartype(),
          context.deterministicAlgorithms(),
          context.deterministicAlgorithmsWarnOnly(),
          context.deterministicFillUninitializedMemory(),
          torch::autograd::AnomalyMode::is_enabled(),
          torch::autograd::AnomalyMode::should_check_nan(),
          context.float32MatmulPrecision(),
          context.userEnabledFlashSDP(),
          context.userEnabledMemEfficientSDP(),
          context.userEnabledMathSDP(),
          context.userEnabledCuDNNSDP(),
          context.userEnabledOverrideableSDP(),
          context.allowFP16BF16ReductionMathSDP(),
          context.userEnabledMkldnn(),
          context.deterministicMkldnn(),
          context.userEnabledNNPACK(),
          context.allowFP16ReductionCPU(),
          context.userEnabledCuDNN(),
          context.benchmarkCuDNN(),
          context.deterministicCuDNN(),
          context.allowTF32CuDNN(),
          context.linalgPreferredBackend(),
          context.qEngine(),
          context.checkSparseTensorInvariants(),
          context.sDPPriorityOrder()};
}

FlagsCheck::FlagsCheck(PyTypeObject* type, PyObject* function, PyObject* expected)
    : flags_(Flags::now()), type_(type), function_(function), expected_(expected) {}

bool FlagsCheck::holds(Part* part) {
  if (is_as_it_was()) {
    const unsigned tag = version_of(type_);
    if (tag != 0 && tag == tag_) return true;
    if (ProbeCheck(function_, reinterpret_cast<PyObject*>(type_), expected_).holds(part)) {
      tag_ = version_of(type_);
      return true;
    }
    return false;
  }
  if (part != nullptr) *part = py::none();
  return false;
}

// Torch throws where somebody has mixed old and new switches: they have changed.
bool FlagsCheck::is_as_it_was() const {
  try {
    return Flags::now() == flags_;
  } catch (const c10::Error&) {
    return false;
  }
}

}  // namespace waterflow
