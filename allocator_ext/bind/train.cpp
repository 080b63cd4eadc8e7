#include "bind/train.h"

#include <pybind11/native_enum.h>
#include <torch/extension.h>

#include <optional>
#include <utility>

#include "account/look.h"
#include "account/schedule.h"
#include "bind/errors.h"
#include "runtime/lane_pool.h"
#include "runtime/thread_state.h"
#include "runtime/train.h"

namespace py = pybind11;

namespace waterflow {
namespace {

// A look at Python state before the first step, by whoever holds the interpreter's lock or not.
// Behind each step what is known ahead of the schedulers is written; that alone is looked at each
// time, since nothing else of the job's has run.
std::function<bool(std::size_t, Tape&)> locked_look(Look* look, Schedule* schedule) {
  if (look == nullptr) return [](std::size_t, Tape&) { return true; };
  const std::size_t before = schedule == nullptr ? 0 : schedule->done();
  return [look, schedule, before](std::size_t made, Tape& next) {
    if (made != 0 && schedule == nullptr) return true;
    py::gil_scoped_acquire acquire;
    if (schedule != nullptr) {
      if (!schedule->advance_to(before + made) || !schedule->holds()) return false;
      for (const auto& [index, value] : schedule->registers()) next.set_register(index, value);
    }
    return made != 0 || look->holds();
  };
}

// Of a thread that is in the job's own context between two steps: what steps are run with in its
// place, and what that context was, which the job's Python may have changed since.
struct Inside {
  ThreadState outside;
  ThreadModes modes;
  ThreadSettings settings = ThreadSettings::here();

  bool is_as_before() const { return ThreadModes() == modes && ThreadSettings::here() == settings; }
};

// What the extension is given of Python's, beside what it can do without.
struct BoundTrain {
  Train train;
  py::object look, scheduled;  // keep what the train refers to
  Schedule* schedule;          // none: null
  std::optional<Inside> inside;
};

BoundTrain make_train(std::vector<std::vector<at::Tensor>> batches, py::object look,
                      std::shared_ptr<RoundMemory> beside, bool keeps_blocks,
                      std::shared_ptr<Signal> signal, std::uint64_t seen, double seconds,
                      bool finite_only, py::object scheduled,
                      const std::optional<ThreadState>& outside, int first_kind) {
  auto* schedule = scheduled.is_none() ? nullptr : py::cast<Schedule*>(scheduled);
  auto holds = locked_look(look.is_none() ? nullptr : py::cast<Look*>(look), schedule);
  return {{std::move(batches), std::move(holds), std::move(beside), keeps_blocks, std::move(signal),
           seen, seconds, finite_only, first_kind},
          std::move(look),
          std::move(scheduled),
          schedule,
          outside ? std::optional(Inside{*outside}) : std::nullopt};
}

std::shared_ptr<TrainResult> run(LanePool& pool, int lane, const FlowStep& step, Gate& gate,
                                 const BoundTrain& bound) {
  auto result = std::make_shared<TrainResult>();
  const std::size_t before = bound.schedule == nullptr ? 0 : bound.schedule->done();
  const auto make = [&] { *result = run_train(pool, lane, step, gate, bound.train, true); };
  const bool is_as_before = !bound.inside || bound.inside->is_as_before();
  std::optional<ThreadStateScope> outside;
  if (bound.inside) outside.emplace(bound.inside->outside);
  // With the lock, which others would take otherwise.
  if (!is_as_before || !bound.train.holds(0, *step.job.tape)) {
    result->end = TrainEnd::kChanged;
  } else {
    run_unlocked(make);
  }
  step.job.tape->set_batch({});  // with the lock, which letting go of what Python has too takes
  if (bound.schedule != nullptr) {
    // A loss that is no number ends the job before its scheduler is stepped.
    const bool ends = result->end == TrainEnd::kNotFinite;
    bound.schedule->advance_to(before + result->losses.size() - ends);
    result->scheduled = bound.schedule->done() - before;
  }
  return result;
}

py::list spans_of(const TrainResult& result) {
  py::list spans;
  for (const auto& span : result.spans) {
    spans.append(
        py::make_tuple(span.lane, span.job, span.group, span.start.seconds, span.stop.seconds));
  }
  return spans;
}

}  // namespace

void bind_trains(py::module_& m) {
  py::native_enum<TrainEnd>(m, "TrainEnd", "enum.Enum")
      .value("ARRIVED", TrainEnd::kArrived)
      .value("CALLED", TrainEnd::kCalled)
      .value("LATE", TrainEnd::kLate)
      .value("CHANGED", TrainEnd::kChanged)
      .value("DEVIATED", TrainEnd::kDeviated)
      .value("NOT_FINITE", TrainEnd::kNotFinite)
      .value("FAILED", TrainEnd::kFailed)
      .value("HELD", TrainEnd::kHeld)
      .finalize();
  py::class_<TrainResult, std::shared_ptr<TrainResult>>(m, "TrainResult")
      .def_readonly("losses", &TrainResult::losses)
      .def_readonly("metrics", &TrainResult::metrics)
      .def_readonly("end", &TrainResult::end)
      .def_readonly("worked", &TrainResult::worked)
      .def_readonly("scheduled", &TrainResult::scheduled)
      .def_property_readonly("met_change",
                             [](const TrainResult& self) { return self.end == TrainEnd::kChanged; })
      .def_property_readonly("may_go_on",
                             [](const TrainResult& self) {
                               return self.end == TrainEnd::kArrived || self.end == TrainEnd::kLate;
                             })
      .def_property_readonly("seconds", &TrainResult::seconds)
      .def_property_readonly("error",
                             [](const TrainResult& self) { return python_exception(self.error); })
      .def("spans", &spans_of);
  py::class_<BoundTrain>(m, "Train")
      .def(py::init(&make_train), py::arg("batches"), py::arg("look"), py::arg("beside"),
           py::arg("keeps_blocks"), py::arg("signal"), py::arg("seen"), py::arg("seconds"),
           py::arg("finite_only") = false, py::arg("schedule") = py::none(),
           py::arg("outside") = py::none(), py::arg("first_kind") = 0)
      .def("set_batch", [](BoundTrain& self, std::vector<at::Tensor> batch) {
        self.train.batches.assign(1, std::move(batch));
      });
  m.def("run_train", &run, py::arg("pool"), py::arg("lane"), py::arg("step"), py::arg("gate"),
        py::arg("train"));
}

}  // namespace waterflow
