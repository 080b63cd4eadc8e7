// Names and arguments are those of the C++ headers, so that one documentation serves both.
// Pointers are Python integers, the event log a numpy array with one record an event.
#include "bind/core.h"

#include <pybind11/functional.h>
#include <pybind11/native_enum.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/arena/arena.h"
#include "core/check/checker.h"
#include "core/device/arenas.h"
#include "core/device/cuda_device.h"
#include "core/plan/flow_simulation.h"
#include "core/plan/gate.h"
#include "core/plan/memory_plan.h"
#include "core/plan/pile.h"
#include "core/plan/rehearsal.h"

namespace py = pybind11;
using namespace py::literals;

namespace waterflow {
namespace {

using Log = py::array_t<Event, py::array::c_style | py::array::forcecast>;
template <typename T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;
using StepArrays = std::tuple<Array<std::int64_t>, Array<std::int32_t>, Array<std::int32_t>>;
using SlotTuple = std::tuple<int, int, int>;

std::optional<std::size_t> as_limit(std::size_t limit) {
  return limit == kNoLimit ? std::nullopt : std::optional<std::size_t>(limit);
}

void* as_pointer(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

std::optional<std::uintptr_t> as_address(const void* pointer) {
  if (pointer == nullptr) return std::nullopt;
  return reinterpret_cast<std::uintptr_t>(pointer);
}

void bind_values(py::module_& m) {
  py::native_enum<ChunkState>(m, "ChunkState", "enum.Enum")
      .value("LIVE", ChunkState::kLive)
      .value("UNSYNCED", ChunkState::kUnsynced)
      .value("SYNCED", ChunkState::kSynced)
      .finalize();
  py::native_enum<EventKind>(m, "EventKind", "enum.IntEnum")
      .value("ALLOC", EventKind::kAlloc)
      .value("USE", EventKind::kUse)
      .value("FREE", EventKind::kFree)
      .value("SYNC", EventKind::kSync)
      .value("MARK", EventKind::kMark)
      .value("COPY", EventKind::kCopy)
      .value("JOIN", EventKind::kJoin)
      .finalize();
  py::class_<Chunk>(m, "Chunk")
      .def_readonly("offset", &Chunk::offset)
      .def_readonly("bytes", &Chunk::bytes)
      .def_readonly("state", &Chunk::state)
      .def_readonly("users", &Chunk::users)
      .def_readonly("job", &Chunk::job)
      .def_readonly("lane", &Chunk::lane)
      .def("__repr__", [](const Chunk& chunk) {
        return py::str("Chunk(offset={}, bytes={}, state={}, users={:#x}, job={}, lane={})")
            .format(chunk.offset, chunk.bytes, chunk.state, chunk.users, chunk.job, chunk.lane);
      });
  py::class_<Violation>(m, "Violation")
      .def_readonly("index", &Violation::index)
      .def_readonly("lane", &Violation::lane)
      .def_readonly("offset", &Violation::offset)
      .def_readonly("message", &Violation::message)
      .def("__repr__", [](const Violation& violation) { return violation.message; });
  py::class_<Statistics>(m, "Statistics")
      .def_readonly("capacity", &Statistics::capacity)
      .def_readonly("taken", &Statistics::taken)
      .def_readonly("live", &Statistics::live)
      .def_readonly("peak", &Statistics::peak)
      .def_readonly("extent", &Statistics::extent)
      .def_readonly("free", &Statistics::free)
      .def_readonly("largest_free", &Statistics::largest_free)
      .def_readonly("allocations", &Statistics::allocations)
      .def_readonly("forced_syncs", &Statistics::forced_syncs)
      .def_readonly("explicit_syncs", &Statistics::explicit_syncs);
}

void bind_allocator(py::module_& m) {
  py::class_<Allocator>(m, "Allocator")
      .def(py::init([](std::size_t capacity, std::size_t alignment, int lanes) {
             return Allocator(Options{capacity, alignment, lanes});
           }),
           "capacity"_a, "alignment"_a = 64, "lanes"_a = 2)
      .def("allocate", &Allocator::allocate, "bytes"_a, "lane"_a, "job"_a, "may_sync"_a = true)
      .def("allocate_at", &Allocator::allocate_at, "offset"_a, "bytes"_a, "lane"_a, "job"_a)
      .def("use", &Allocator::use, "offset"_a, "lane"_a)
      .def("free", &Allocator::free, "offset"_a, "lane"_a)
      .def("synchronize", &Allocator::synchronize)
      .def(
          "set_limit",
          [](Allocator& self, JobId job, std::optional<std::size_t> bytes) {
            self.set_limit(job, bytes.value_or(kNoLimit));
          },
          "job"_a, "bytes"_a)
      .def(
          "limit", [](const Allocator& self, JobId job) { return as_limit(self.limit(job)); },
          "job"_a)
      .def("held", &Allocator::held, "job"_a)
      .def("peak", py::overload_cast<>(&Allocator::peak, py::const_))
      .def("peak", py::overload_cast<JobId>(&Allocator::peak, py::const_), "job"_a)
      .def("live", &Allocator::live)
      .def("extent", &Allocator::extent)
      .def("live_end", &Allocator::live_end)
      .def("version", &Allocator::version)
      .def("capacity", &Allocator::capacity)
      .def("alignment", &Allocator::alignment)
      .def("lanes", &Allocator::lanes)
      .def("free_bytes", &Allocator::free_bytes)
      .def("largest_free", &Allocator::largest_free)
      .def("allocations", &Allocator::allocations)
      .def("syncs", &Allocator::syncs)
      .def("forced_syncs", &Allocator::forced_syncs)
      .def("explicit_syncs", &Allocator::explicit_syncs)
      .def("reset_peaks", &Allocator::reset_peaks)
      .def("find", &Allocator::find, "offset"_a)
      .def("chunks", &Allocator::chunks)
      .def("resize", &Allocator::resize, "capacity"_a)
      .def("record", &Allocator::record, "on"_a)
      .def("take_log", [](Allocator& self) { return as_array(self.take_log()); })
      .def("check_consistency", &Allocator::check_consistency)
      .def("copy", [](const Allocator& self) { return Allocator(self); });
}

py::tuple timeline_arrays(const Arena& arena) {
  const Timeline timeline = arena.timeline();
  return py::make_tuple(as_array(timeline.seconds()), as_array(timeline.jobs()),
                        as_array(timeline.held()));
}

using ArenaClass = py::class_<Arena, std::shared_ptr<Arena>>;

void bind_arena_memory(ArenaClass& arena) {
  arena.def_static("host", &host_arena, "capacity"_a, "lanes"_a = 2)
      .def_static("virtual", &virtual_arena, "capacity"_a, "lanes"_a = 2)
      .def_static(
          "cuda",
          [](const std::shared_ptr<LaneStreams>& streams, std::size_t capacity, bool host_tensors) {
            const TensorKind kind = host_tensors ? TensorKind::kHost : TensorKind::kCuda;
            return cuda_arena(streams, capacity, kind);
          },
          "streams"_a, "capacity"_a, "host_tensors"_a)
      .def(
          "allocate",
          [](Arena& self, std::size_t bytes, Lane lane, JobId job, bool may_sync) {
            return as_address(self.allocate(bytes, lane, job, may_sync));
          },
          "bytes"_a, "lane"_a, "job"_a, "may_sync"_a = true)
      .def(
          "allocate_at",
          [](Arena& self, std::size_t offset, std::size_t bytes, Lane lane, JobId job) {
            return as_address(self.allocate_at(offset, bytes, lane, job));
          },
          "offset"_a, "bytes"_a, "lane"_a, "job"_a)
      .def(
          "use",
          [](Arena& self, std::uintptr_t pointer, Lane lane) {
            self.use(as_pointer(pointer), lane);
          },
          "pointer"_a, "lane"_a)
      .def(
          "free",
          [](Arena& self, std::uintptr_t pointer, Lane lane) {
            self.free(as_pointer(pointer), lane);
          },
          "pointer"_a, "lane"_a)
      .def("synchronize", &Arena::synchronize)
      .def("finish", &Arena::finish, py::call_guard<py::gil_scoped_release>())
      .def(
          "owns",
          [](const Arena& self, std::uintptr_t pointer) { return self.owns(as_pointer(pointer)); },
          "pointer"_a)
      .def(
          "offset_of",
          [](const Arena& self, std::uintptr_t pointer) {
            return self.offset_of(as_pointer(pointer));
          },
          "pointer"_a)
      .def(
          "pointer_to",
          [](const Arena& self, std::size_t offset) {
            return reinterpret_cast<std::uintptr_t>(self.pointer_to(offset));
          },
          "offset"_a)
      .def(
          "find",
          [](const Arena& self, std::uintptr_t pointer) { return self.find(as_pointer(pointer)); },
          "pointer"_a);
}

void bind_arena_state(ArenaClass& arena) {
  arena.def("has_memory", &Arena::has_memory)
      .def_property_readonly("alignment", &Arena::alignment)
      .def("commit", &Arena::commit, py::call_guard<py::gil_scoped_release>())
      .def("resize", &Arena::resize, "capacity"_a)
      .def("give_back", &Arena::give_back, py::call_guard<py::gil_scoped_release>())
      .def("set_growth", &Arena::set_growth, "step"_a)
      .def(
          "set_limit",
          [](Arena& self, JobId job, std::optional<std::size_t> bytes) {
            self.set_limit(job, bytes.value_or(kNoLimit));
          },
          "job"_a, "bytes"_a)
      .def(
          "limit", [](const Arena& self, JobId job) { return as_limit(self.limit(job)); }, "job"_a)
      .def("held", &Arena::held, "job"_a)
      .def("peak", &Arena::peak, "job"_a)
      .def("statistics", &Arena::statistics)
      .def("reset_peaks", &Arena::reset_peaks)
      .def_property_readonly("live_end", &Arena::live_end)
      .def_property_readonly("version", &Arena::version)
      .def("snapshot", &Arena::snapshot)
      .def("record", &Arena::record, "on"_a)
      .def("take_log", [](Arena& self) { return as_array(self.take_log()); })
      .def("timeline", &timeline_arrays)
      .def("enable_timeline", &Arena::enable_timeline, "on"_a)
      .def("clear_timeline", &Arena::clear_timeline);
}

StepEvents as_step(const StepArrays& arrays) {
  const auto& [bytes, ids, group_ends] = arrays;
  if (bytes.size() != ids.size()) {
    throw std::invalid_argument(
        "a step needs one id for each event: " + std::to_string(bytes.size()) + " events, " +
        std::to_string(ids.size()) + " ids");
  }
  StepEvents step;
  step.events.reserve(bytes.size());
  for (py::ssize_t at = 0; at < bytes.size(); ++at) {
    step.events.push_back({bytes.data()[at], ids.data()[at]});
  }
  step.group_ends.assign(group_ends.data(), group_ends.data() + group_ends.size());
  return step;
}

RehearsalResult rehearse_arrays(const Allocator& state, const std::vector<StepArrays>& arrays,
                                const std::vector<JobId>& jobs,
                                const std::vector<std::vector<SlotTuple>>& tuples) {
  std::vector<StepEvents> steps;
  for (const StepArrays& step : arrays) steps.push_back(as_step(step));
  std::vector<std::vector<Slot>> pairs(tuples.size());
  for (std::size_t pair = 0; pair < pairs.size(); ++pair) {
    for (const auto& [lane, step, group] : tuples[pair]) pairs[pair].push_back({lane, step, group});
  }
  Allocator copy = state;  // with the GIL, which protects the original
  py::gil_scoped_release release;
  return rehearse(std::move(copy), steps, jobs, pairs);
}

py::list offset_arrays(const RehearsalResult& result) {
  py::list arrays;
  for (const std::vector<std::size_t>& offsets : result.offsets) {
    py::array_t<std::int64_t> array(static_cast<py::ssize_t>(offsets.size()));
    std::copy(offsets.begin(), offsets.end(), array.mutable_data());
    arrays.append(std::move(array));
  }
  return arrays;
}

void bind_rehearsal(py::module_& m) {
  py::class_<RehearsalResult>(m, "RehearsalResult")
      .def_readonly("fits", &RehearsalResult::fits)
      .def_readonly("why", &RehearsalResult::why)
      .def_readonly("failed_pair", &RehearsalResult::failed_pair)
      .def_readonly("failed_step", &RehearsalResult::failed_step)
      .def_readonly("failed_group", &RehearsalResult::failed_group)
      .def_readonly("peak", &RehearsalResult::peak)
      .def_readonly("extent", &RehearsalResult::extent)
      .def_readonly("pair_peaks", &RehearsalResult::pair_peaks)
      .def_property_readonly("offsets", &offset_arrays);
  m.def("rehearse", &rehearse_arrays, "state"_a, "steps"_a, "jobs"_a, "pairs"_a);
}

// Steps of one round share what tells them of each other's deviations. `part`: of the arena's
// `LiveBytes`, for the first of them; the others have those behind it.
void begin_plans(Arena& arena,
                 const std::vector<std::pair<std::shared_ptr<MemoryPlan>, JobId>>& plans,
                 const std::shared_ptr<RoundMemory>& round, bool keep_blocks, int part) {
  for (const auto& [plan, job] : plans) plan->begin(arena, job, round, keep_blocks, part++);
}

void bind_memory_plan(py::module_& m) {
  py::class_<MemoryPlan, std::shared_ptr<MemoryPlan>>(m, "MemoryPlan")
      .def(py::init([](const StepArrays& step, const Array<std::int32_t>& instructions,
                       std::size_t num_instructions, std::vector<std::size_t> offsets,
                       std::uint64_t version) {
             return std::make_shared<MemoryPlan>(
                 as_step(step).events,
                 std::vector<std::int32_t>(instructions.data(),
                                           instructions.data() + instructions.size()),
                 num_instructions, std::move(offsets), version);
           }),
           "step"_a, "instructions"_a, "num_instructions"_a, "offsets"_a, "version"_a)
      .def_property_readonly("deviations", &MemoryPlan::deviations)
      .def("begin_instruction", &MemoryPlan::begin_instruction, "index"_a)
      .def("end_instruction", &MemoryPlan::end_instruction, "arena"_a, "lane"_a)
      .def(
          "take",
          [](MemoryPlan& self, Arena& arena, std::size_t bytes, Lane lane) {
            return as_address(self.take(arena, bytes, lane));
          },
          "arena"_a, "bytes"_a, "lane"_a)
      .def(
          "release",
          [](MemoryPlan& self, Arena& arena, std::uintptr_t pointer) {
            return self.release(arena, as_pointer(pointer));
          },
          "arena"_a, "pointer"_a)
      .def("close", &MemoryPlan::close, "arena"_a);
  py::class_<RoundMemory, std::shared_ptr<RoundMemory>>(m, "RoundMemory")
      .def(py::init<std::size_t, std::size_t>(), "start"_a, "stop"_a)
      .def_property_readonly("deviated",
                             [](const RoundMemory& self) { return self.deviated.load(); });
  m.def("begin_plans", &begin_plans, "arena"_a, "plans"_a, "round"_a, "keep_blocks"_a,
        "part"_a = 0);
}

Pile pile_arrays(const Array<std::int64_t>& bytes, const Array<std::int32_t>& ids,
                 std::size_t limit) {
  const std::vector<StepEvent> events = as_step({bytes, ids, Array<std::int32_t>()}).events;
  py::gil_scoped_release release;
  return pile_up(events, limit);
}

// A simulated job: demand, seconds of each group, weight, whether it goes first.
using FlowingTuple = std::tuple<std::shared_ptr<Demand>, std::vector<double>, double, bool>;

py::list as_list(const FlowMarks& marks) {
  py::list list(py::make_tuple(marks.now, marks.alone, marks.both, marks.work, marks.waits));
  for (const double seconds : marks.worked) list.append(seconds);
  return list;
}

// The marks as lists of numbers, and spans as (start, stop, lane, job, group).
py::tuple simulated(const std::vector<FlowingTuple>& jobs, std::size_t range, int lanes,
                    int open_to_others, const NextJob& next_job) {
  std::vector<FlowingJob> flowing;
  flowing.reserve(jobs.size());
  for (const auto& [demand, seconds, weight, goes_first] : jobs) {
    flowing.push_back({demand, seconds, weight, goes_first});
  }
  const FlowCourse course = simulate_flow(flowing, range, lanes, open_to_others, next_job);
  py::list spans;
  for (const FlowSpan& span : course.spans) {
    spans.append(py::make_tuple(span.start, span.stop, span.lane, span.job, span.group));
  }
  return py::make_tuple(as_list(course.warm), as_list(course.end), spans);
}

void bind_flow(py::module_& m) {
  py::class_<Pile>(m, "Pile")
      .def_property_readonly("offsets",
                             [](const Pile& self) { return as_array<std::size_t>(self.offsets); })
      .def_property_readonly("reach",
                             [](const Pile& self) { return as_array<std::size_t>(self.reach); })
      .def_readonly("extent", &Pile::extent);
  m.def("pile_up", &pile_arrays, "bytes"_a, "ids"_a, "limit"_a);
  m.def(
      "reach_of",
      [](const Array<std::int64_t>& bytes, const Array<std::int32_t>& ids,
         const std::vector<std::size_t>& offsets) {
        const std::vector<StepEvent> events = as_step({bytes, ids, Array<std::int32_t>()}).events;
        return as_array<std::size_t>(reach_of(events, offsets));
      },
      "bytes"_a, "ids"_a, "offsets"_a);
  py::class_<Demand, std::shared_ptr<Demand>>(m, "Demand")
      .def(py::init<std::vector<std::size_t>, std::vector<std::size_t>>(), "during"_a, "after"_a)
      .def_readonly("during", &Demand::during)
      .def_readonly("after", &Demand::after)
      .def_property_readonly("most", &Demand::most)
      .def("__len__", &Demand::groups);
  m.def("most_together", &most_together, "a"_a, "b"_a, "range"_a);
  // Those that wait are not bound: only lanes wait, and they do it without the GIL.
  py::class_<Gate, std::shared_ptr<Gate>>(m, "Gate")
      .def(py::init<std::size_t, int>(), "range"_a, "lanes"_a)
      .def(
          "try_begin",
          [](Gate& self, Lane lane, const std::shared_ptr<Demand>& demand) {
            return self.try_begin(lane, demand);
          },
          "lane"_a, "demand"_a)
      .def("try_enter", &Gate::try_enter, "lane"_a)
      .def(
          "leave", [](Gate& self, Lane lane) { self.leave(lane, Mark{}); }, "lane"_a)
      .def("end", &Gate::end, "lane"_a)
      .def_property_readonly("waits", &Gate::waits)
      .def_property_readonly("waited_seconds", &Gate::waited_seconds);
  m.def("simulate_flow", &simulated, "jobs"_a, "range"_a, "lanes"_a, "open_to_others"_a,
        "next_job"_a);
}

void bind_judges(py::module_& m) {
  m.attr("EVENT_DTYPE") = py::dtype::of<Event>();
  m.def(
      "check_happens_before",
      [](const Log& log, int lanes) {
        return check_happens_before({log.data(), log.data() + log.size()}, lanes);
      },
      "log"_a, "lanes"_a);
}

}  // namespace

void bind_core(py::module_& m) {
  PYBIND11_NUMPY_DTYPE(Event, offset, bytes, lane, job, kind);
  // Subclasses of ValueError, as an offset is an argument; and of RuntimeError.
  py::register_exception<UnknownChunk>(m, "UnknownChunk", PyExc_ValueError);
  py::register_exception<StalePlan>(m, "StalePlan", PyExc_RuntimeError);
  py::register_exception<BackendError>(m, "BackendError", PyExc_RuntimeError);
  py::register_exception<Inconsistent>(m, "Inconsistent", PyExc_AssertionError);
  m.attr("NO_LANE") = kNoLane;
  bind_values(m);
  bind_allocator(m);
  ArenaClass arena(m, "Arena");
  bind_arena_memory(arena);
  bind_arena_state(arena);
  bind_rehearsal(m);
  bind_memory_plan(m);
  bind_flow(m);
  bind_judges(m);
}

}  // namespace waterflow
