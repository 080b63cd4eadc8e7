// One look at all that a captured step takes for granted, in the context of its job.
#pragma once

#include <pybind11/pybind11.h>

namespace waterflow {

class Look {
 public:
  // `guards`: Guards, all of which are to hold. `variables`: the contextvars.Context to look in.
  Look(pybind11::list guards, pybind11::object variables);
  bool holds() const;

  // For the garbage collector: see Guards.
  PyObject* guards() const { return guards_.ptr(); }
  PyObject* variables() const { return variables_.ptr(); }
  void clear();

 private:
  pybind11::list guards_;
  pybind11::object variables_;
};

void bind_look(pybind11::module_& m);

}  // namespace waterflow
