#include "account/schedule.h"

#include <pybind11/stl.h>

namespace py = pybind11;

namespace waterflow {

Schedule::Schedule(const py::list& places, const py::object& missing, const py::list& whole,
                   std::vector<Row> rows)
    : rows_(std::move(rows)) {
  for (py::handle one : places) {
    auto [dict, key, value] = py::cast<std::tuple<py::dict, py::object, py::object>>(one);
    if (value.is(missing)) value = py::object();
    places_.push_back({std::move(dict), std::move(key), std::move(value)});
  }
  for (py::handle one : whole) {
    auto dict = py::cast<py::dict>(one);
    Py_ssize_t size = 0;
    for (const Place& place : places_) size += place.dict.is(dict) && place.value;
    whole_.push_back({std::move(dict), size});
  }
  for (const Row& row : rows_) {
    for (const auto& [number, value] : row.values) places_.at(number);  // throws for no such place
  }
}

bool Schedule::holds() const {
  for (const Whole& whole : whole_) {
    if (PyDict_GET_SIZE(whole.dict.ptr()) != whole.size) return false;
  }
  for (const Place& place : places_) {
    PyObject* value = PyDict_GetItemWithError(place.dict.ptr(), place.key.ptr());
    if (value == nullptr) PyErr_Clear();
    if (value != place.value.ptr()) return false;
  }
  return true;
}

bool Schedule::advance_to(std::size_t steps) {
  for (; done_ < steps; ++done_) {
    if (done_ == rows_.size() || !holds()) return false;
    write(rows_[done_]);
  }
  return true;
}

void Schedule::write(const Row& row) {
  for (const auto& [number, value] : row.values) {
    Place& place = places_[number];
    if (PyDict_SetItem(place.dict.ptr(), place.key.ptr(), value.ptr()) != 0) {
      throw py::error_already_set();
    }
    place.value = value;
  }
  for (Whole& whole : whole_) whole.size = PyDict_GET_SIZE(whole.dict.ptr());
}

const Schedule::Registers& Schedule::registers() const {
  static const Registers none;
  return done_ == 0 ? none : rows_[done_ - 1].registers;
}

void bind_schedule(py::module_& m) {
  py::class_<Schedule>(m, "Schedule")
      .def(py::init([](const py::list& places, const py::object& missing, const py::list& whole,
                       const py::list& rows) {
             using Given =
                 std::pair<std::vector<std::pair<std::size_t, py::object>>, Schedule::Registers>;
             std::vector<Schedule::Row> taken;
             for (auto& [values, registers] : py::cast<std::vector<Given>>(rows)) {
               taken.push_back({std::move(values), std::move(registers)});
             }
             return Schedule(places, missing, whole, std::move(taken));
           }),
           py::arg("places"), py::arg("missing"), py::arg("whole"), py::arg("rows"))
      .def("holds", &Schedule::holds)
      .def("advance_to", &Schedule::advance_to, py::arg("steps"))
      .def_property_readonly("done", &Schedule::done)
      .def_property_readonly("registers", &Schedule::registers);
}

}  // namespace waterflow
