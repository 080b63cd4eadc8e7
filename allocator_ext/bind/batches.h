#pragma once

#include <pybind11/pybind11.h>

namespace waterflow {

void bind_batches(pybind11::module_& m);

}  // namespace waterflow
