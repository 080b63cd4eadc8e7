#include "bind/throttle.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <utility>

#include "core/plan/alternation.h"
#include "core/plan/signal.h"
#include "core/plan/throttle.h"

namespace py = pybind11;
using namespace py::literals;

namespace waterflow {

void bind_throttles(py::module_& m) {
  py::class_<Signal, std::shared_ptr<Signal>>(m, "Signal")
      .def(py::init<>())
      .def("call", &Signal::call)
      .def_property_readonly("calls", &Signal::calls);
  py::class_<Precedence, std::shared_ptr<Precedence>>(m, "Precedence")
      .def(py::init<>())
      .def("enter", &Precedence::enter)
      .def("leave", &Precedence::leave)
      .def("disturb", &Precedence::disturb, "jobs"_a)
      .def_property_readonly("holds", &Precedence::holds)
      .def_property_readonly("is_busy", &Precedence::is_busy)
      .def_property_readonly("seconds", &Precedence::seconds);
  py::class_<Alternation, std::shared_ptr<Alternation>>(m, "Alternation")
      .def(py::init<std::shared_ptr<Precedence>, double, double>(), "precedence"_a, "tolerance"_a,
           "most_seconds"_a)
      .def("begin", &Alternation::begin)
      .def("step_done", &Alternation::step_done, "kind"_a)
      .def("leave", &Alternation::leave, "kind"_a, "steps"_a)
      .def("note", &Alternation::note, "kind"_a, "seconds"_a, "steps"_a, "disturbed"_a = false)
      .def("stop", &Alternation::stop)
      .def_property_readonly("holds", &Alternation::holds)
      .def_property_readonly("harm", [](const Alternation& self) {
        const auto harm = self.harm();
        return harm ? std::optional(std::pair(harm->slowdown, harm->error)) : std::nullopt;
      });
  py::class_<Throttle, std::shared_ptr<Throttle>>(m, "Throttle")
      .def(py::init<std::shared_ptr<Precedence>, std::shared_ptr<Signal>>(), "precedence"_a,
           "signal"_a)
      .def_property("first", &Throttle::is_first, &Throttle::set_first)
      .def_property("duty", &Throttle::duty, &Throttle::set_duty)
      .def("begin", &Throttle::begin)
      .def(
          "pause", [](Throttle& self) { self.pause([] { return false; }); },
          py::call_guard<py::gil_scoped_release>())
      .def("end", &Throttle::end)
      .def("owe", &Throttle::owe, "seconds"_a)
      .def("compare", &Throttle::compare, "comparison"_a)
      .def("may_begin", &Throttle::may_begin)
      .def_property_readonly("due", &Throttle::due)
      .def_property_readonly("rested_seconds", &Throttle::rested_seconds);
}

}  // namespace waterflow
