// Errors on their way from C++ to Python, and calls that need not hold the interpreter's lock.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>
#include <optional>

namespace waterflow {

// The matching Python exception; None where there is no error.
pybind11::object python_exception(const std::exception_ptr& error);
// Throws the matching Python exception, if there is an error.
void raise_as_python(const std::exception_ptr& error);

// Runs without the interpreter lock, where it may take a while, and raises what it throws as the
// matching Python exception. The lock, given up for a moment, may be long in coming back.
template <typename Function>
void run_unlocked(Function function, bool takes_a_while = true) {
  std::exception_ptr error;
  {
    std::optional<pybind11::gil_scoped_release> release;
    if (takes_a_while) release.emplace();
    try {
      function();
    } catch (...) {
      error = std::current_exception();
    }
  }
  raise_as_python(error);
}

}  // namespace waterflow
