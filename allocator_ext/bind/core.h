// The Python face of the core: no torch, so that plans and tests need none.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <vector>

namespace waterflow {

void bind_core(pybind11::module_& m);

template <typename T>
pybind11::array_t<T> as_array(const std::vector<T>& values) {
  return pybind11::array_t<T>(static_cast<pybind11::ssize_t>(values.size()), values.data());
}

}  // namespace waterflow
