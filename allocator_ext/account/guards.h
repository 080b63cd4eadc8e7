// A flat list of checks that Python state is as it was, as compilers keep for what they
// specialised.
//
// Whoever walks the state adds a check for each place, in the order of the walk; asking whether all
// hold costs some nanoseconds a place and runs none of the user's code.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <vector>

#include "account/checks.h"

namespace waterflow {

class Guards {
 public:
  // Each adds one check. What they return is what the place holds, for the walk to go on.

  // Attributes in an object's dictionary whose names count (null: all), and the object's class.
  pybind11::list attributes(pybind11::object holder, pybind11::object names,
                            pybind11::object skipped);
  // A class's own attributes whose names count, special methods among them, and its bases.
  pybind11::list type(pybind11::object type, pybind11::object names, pybind11::object skipped);
  void keys(pybind11::dict dict, const pybind11::list& keys);
  pybind11::list mapping(pybind11::dict dict, pybind11::object skipped);
  // Of dictionaries that are empty; what it tells of one that is no longer is its index.
  void empties(const pybind11::list& dicts);
  pybind11::list items(pybind11::object container, pybind11::object base);
  pybind11::list cell(pybind11::object cell);
  void function(pybind11::object function);
  void functions(const pybind11::list& functions);
  pybind11::list slot(pybind11::object holder, pybind11::object descriptor);
  void tensor(pybind11::object tensor);
  // Throws std::invalid_argument if there is no contiguous memory.
  void buffer(pybind11::object object);
  // Torch's switches; and what the function says about the class, asked when that has changed.
  void flags(pybind11::object type, pybind11::object function);
  void probe(pybind11::object function, pybind11::object object, pybind11::object expected);

  bool holds();
  // The first check that does not hold, by its number, and where; None if all hold.
  pybind11::object difference();
  // All of them.
  pybind11::list differences();
  std::size_t size() const { return checks_.size(); }

  // For the garbage collector: user's objects may refer back to whoever keeps this.
  PyObject* held() const { return held_.ptr(); }
  void clear();

 private:
  PyObject* hold(const pybind11::object& object);
  template <typename Kind, typename... Arguments>
  Kind& add(Arguments... arguments);
  template <typename Entries>
  pybind11::list hold_entries(const Entries& entries);

  std::vector<std::unique_ptr<Check>> checks_;
  pybind11::list held_;
};

void bind_guards(pybind11::module_& m);

}  // namespace waterflow
