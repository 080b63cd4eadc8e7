// The Python face of the core: no torch, so that plans and tests need none.
#pragma once

#include <pybind11/pybind11.h>

namespace waterflow {

void bind_core(pybind11::module_& m);

}  // namespace waterflow
