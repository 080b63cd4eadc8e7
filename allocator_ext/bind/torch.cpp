#include "bind/torch.h"

#include <ATen/ScalarOps.h>
#include <pybind11/native_enum.h>
#include <pybind11/operators.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/extension.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "bind/bits.h"
#include "bind/core.h"
#include "bind/device.h"
#include "bind/errors.h"
#include "bind/train.h"
#include "runtime/intra_op.h"
#include "runtime/lane.h"
#include "runtime/lane_pool.h"
#include "runtime/parking.h"
#include "runtime/random.h"
#include "runtime/storage.h"
#include "runtime/tape.h"
#include "runtime/thread_state.h"

namespace py = pybind11;

namespace waterflow {
namespace {

// A context manager over a scope object: `__enter__` makes it, `__exit__` destroys it. Scopes wait
// for nothing, so the interpreter lock stays: given up for a moment it may be long in coming back.
template <typename Scope, typename... Parts>
class Manager {
 public:
  explicit Manager(Parts... parts) : parts_(std::move(parts)...) {}
  void enter() {
    scope_ = std::apply([](auto&... part) { return std::make_unique<Scope>(part...); }, parts_);
  }
  void exit(const py::args&) { scope_.reset(); }

 private:
  std::tuple<Parts...> parts_;
  std::unique_ptr<Scope> scope_;
};

bool takes_a_while(const at::Tensor& tensor) {
  return !tensor.is_cpu() || !tensor.has_storage() || tensor.storage().nbytes() > kFewBytes;
}

// What else tells one tensor from another of its shape: whether it is a leaf, asks for its
// gradient, retains it, was made in inference mode, and is lazily conjugated or negated.
std::tuple<bool, bool, bool, bool, bool, bool> tensor_flags(const at::Tensor& tensor) {
  return {tensor.is_leaf(),      tensor.requires_grad(), tensor.retains_grad(),
          tensor.is_inference(), tensor.is_conj(),       tensor.is_neg()};
}

// What an index of a batch stands for by way of subsets' indices, the outermost first: lists,
// tuples or ranges of whole numbers. None where it is no whole number, or out of range.
std::optional<std::int64_t> mapped(const py::list& subsets, py::handle index) {
  auto number = py::reinterpret_borrow<py::object>(index);
  for (py::handle own : subsets) {
    if (!PyLong_CheckExact(number.ptr())) return std::nullopt;
    const Py_ssize_t at = PyLong_AsSsize_t(number.ptr());
    PyObject* item = PyErr_Occurred() ? nullptr : PySequence_GetItem(own.ptr(), at);
    if (item == nullptr) {
      PyErr_Clear();
      return std::nullopt;
    }
    number = py::reinterpret_steal<py::object>(item);
  }
  if (!PyLong_CheckExact(number.ptr())) return std::nullopt;
  const std::int64_t found = PyLong_AsLongLong(number.ptr());
  if (PyErr_Occurred()) {
    PyErr_Clear();
    return std::nullopt;
  }
  return found;
}

// Rows of each tensor, stacked. Where they are few the interpreter lock stays: operators called
// from Python give it up one by one. None where that may not be what a data loader would make of
// the items, or where it would raise an error.
std::optional<std::vector<at::Tensor>> select_rows(const py::tuple& tensors,
                                                   const py::list& subsets,
                                                   const py::list& indices) {
  std::vector<std::int64_t> rows;
  rows.reserve(indices.size());
  for (py::handle index : indices) {
    const auto row = mapped(subsets, index);
    if (!row) return std::nullopt;
    rows.push_back(*row);
  }
  if (rows.empty()) return std::nullopt;
  const auto [least, most] = std::minmax_element(rows.begin(), rows.end());
  std::size_t bytes = 0;
  std::vector<at::Tensor> sources;
  for (py::handle each : tensors) {
    if (!THPVariable_CheckExact(each.ptr())) return std::nullopt;
    const at::Tensor& tensor = THPVariable_Unpack(each.ptr());
    if (!has_plain_rows(tensor) || *least < 0 || *most >= tensor.size(0)) return std::nullopt;
    bytes += tensor.nbytes() / static_cast<std::size_t>(tensor.size(0)) * rows.size();
    sources.push_back(tensor);
  }
  std::optional<py::gil_scoped_release> unlocked;
  if (bytes > kFewBytes) unlocked.emplace();
  const at::Tensor index = at::tensor(rows, at::TensorOptions().dtype(at::kLong));
  std::vector<at::Tensor> selected;
  selected.reserve(sources.size());
  for (const at::Tensor& tensor : sources) selected.push_back(tensor.index_select(0, index));
  return selected;
}

using LaneManager = Manager<LaneScope, LaneContext>;
using ThreadStateManager = Manager<ThreadStateScope, ThreadState>;
using RandomManager = Manager<RandomScope, at::Generator, std::optional<at::Generator>>;

// Asks Python for more room, from inside an operator; an error there means that there is none.
std::shared_ptr<const std::function<bool(std::size_t)>> room_maker(py::function more) {
  auto held = std::shared_ptr<py::function>(new py::function(std::move(more)), [](auto* function) {
    py::gil_scoped_acquire acquire;
    delete function;
  });
  return std::make_shared<const std::function<bool(std::size_t)>>([held](std::size_t bytes) {
    py::gil_scoped_acquire acquire;
    try {
      return py::cast<bool>((*held)(bytes));
    } catch (const std::exception&) {
      return false;
    }
  });
}

c10::TypePtr strip_optional(const c10::TypePtr& type) {
  if (auto optional = type->cast<c10::OptionalType>()) return optional->getElementType();
  return type;
}

bool is_tensor_type(const c10::TypePtr& type) {
  return strip_optional(type)->kind() == c10::TypeKind::TensorType;
}

// The 0-dim tensor that PyTorch itself makes of a Python number given where a tensor is expected.
at::Tensor wrapped_number(const at::Scalar& number) {
  auto tensor = c10::scalar_to_tensor(number);
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

// The same in float32, which PyTorch casts it to beside a tensor of that type.
at::Tensor wrapped_single(double number) {
  auto tensor = at::scalar_tensor(static_cast<float>(number), at::kFloat);
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

c10::IValue constant(const py::handle& value, const c10::TypePtr& type) {
  const bool number = PyFloat_Check(value.ptr()) || PyLong_Check(value.ptr());
  if (number && is_tensor_type(type)) {
    return wrapped_number(torch::jit::toIValue(value, c10::NumberType::get()).toScalar());
  }
  return torch::jit::toIValue(value, type);
}

Argument scalar_list_argument(const py::handle& payload, const c10::TypePtr& type) {
  Argument argument;
  argument.kind = Argument::Kind::kScalars;
  argument.floats = strip_optional(type)->expectRef<c10::ListType>().getElementType()->kind() ==
                    c10::TypeKind::FloatType;
  for (auto item : py::cast<py::list>(payload)) {
    auto [index, number] = py::cast<std::pair<int, double>>(item);
    argument.indices.push_back(index);
    argument.scalars.push_back(number);
  }
  return argument;
}

// An argument as (kind, payload); `type` is what the operator's schema wants there. The kind comes
// as its number, an IntEnum's: the cast of an enum takes several times as long, once an argument.
Argument make_argument(const py::handle& item, const c10::TypePtr& type) {
  auto [kind, payload] = py::cast<std::pair<int, py::object>>(item);
  Argument argument;
  argument.kind = static_cast<Argument::Kind>(kind);
  switch (argument.kind) {
    case Argument::Kind::kConstant:
      argument.value = constant(payload, type);
      return argument;
    case Argument::Kind::kSlot:
      argument.index = py::cast<int>(payload);
      return argument;
    case Argument::Kind::kSlots: {
      argument.indices = py::cast<std::vector<int>>(payload);
      auto element = strip_optional(type)->expectRef<c10::ListType>().getElementType();
      argument.optional_elements = element->kind() == c10::TypeKind::OptionalType;
      return argument;
    }
    case Argument::Kind::kScalar:
      argument.index = py::cast<int>(payload);
      if (is_tensor_type(type)) {
        argument.kind = Argument::Kind::kWrapped;
        argument.value = wrapped_number(0.0);
      }
      return argument;
    case Argument::Kind::kSingle: {
      auto [index, number] = py::cast<std::pair<int, double>>(payload);
      argument.index = index;
      argument.value = wrapped_single(number);
      return argument;
    }
    case Argument::Kind::kScalars:
      return scalar_list_argument(payload, type);
    case Argument::Kind::kGenerator:
      argument.index = py::cast<bool>(payload) ? 1 : 0;  // of the device?
      return argument;
    case Argument::Kind::kWrapped:  // the schema's to say, not the caller's
      break;
  }
  TORCH_CHECK(false, "unknown argument kind ", kind);
}

std::vector<Result> make_results(const py::sequence& items) {
  std::vector<Result> results;
  for (auto item : items) {
    Result result;
    if (py::isinstance<py::list>(item)) {
      result.is_list = true;
      result.elements = py::cast<std::vector<int>>(item);
    } else {
      result.slot = py::cast<int>(item);
    }
    results.push_back(std::move(result));
  }
  return results;
}

void add_operator(Tape& tape, const std::string& name, const std::string& overload,
                  const py::sequence& arguments, const py::sequence& results,
                  std::vector<int> release) {
  Instruction instruction;
  instruction.name = name;
  instruction.op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
  const auto& wanted = instruction.op->schema().arguments();
  TORCH_CHECK(wanted.size() == arguments.size(), name, " wants ", wanted.size(), " arguments, got ",
              arguments.size());
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    instruction.arguments.push_back(make_argument(arguments[i], wanted[i].type()));
  }
  instruction.results = make_results(results);
  instruction.release = std::move(release);
  tape.add(std::move(instruction));
}

void add_load(Tape& tape, int input, int slot, std::vector<int> release) {
  Instruction instruction;
  instruction.kind = Instruction::Kind::kLoad;
  instruction.input = input;
  instruction.slot = slot;
  instruction.release = std::move(release);
  tape.add(std::move(instruction));
}

void add_read_scalar(Tape& tape, int slot, int target, std::vector<int> release) {
  Instruction instruction;
  instruction.kind = Instruction::Kind::kReadScalar;
  instruction.slot = slot;
  instruction.target = target;
  instruction.release = std::move(release);
  tape.add(std::move(instruction));
}

void add_read_loss(Tape& tape, int slot, std::vector<int> release) {
  Instruction instruction;
  instruction.kind = Instruction::Kind::kReadLoss;
  instruction.slot = slot;
  instruction.release = std::move(release);
  tape.add(std::move(instruction));
}

void add_arithmetic(Tape& tape, Arithmetic operation, int target, int left, int right,
                    std::vector<int> release) {
  Instruction instruction;
  instruction.kind = Instruction::Kind::kArithmetic;
  instruction.operation = operation;
  instruction.target = target;
  instruction.left = left;
  instruction.right = right;
  instruction.release = std::move(release);
  tape.add(std::move(instruction));
}

void add_move(Tape& tape, MoveEnd end, int value, int slot, std::size_t home, bool copies) {
  Instruction instruction;
  instruction.kind = Instruction::Kind::kMove;
  instruction.slot = slot;
  instruction.move = {end, value, slot, home, copies};
  tape.add(std::move(instruction));
}

double loss_of(const std::variant<double, at::Tensor>& loss) {
  const auto* host = std::get_if<at::Tensor>(&loss);
  return host == nullptr ? std::get<double>(loss) : host->reshape({-1})[0].item().toDouble();
}

std::vector<double> metrics_of(const std::variant<double, at::Tensor>& loss,
                               const std::vector<double>& metrics) {
  const auto* host = std::get_if<at::Tensor>(&loss);
  if (host == nullptr) return metrics;
  std::vector<double> found;
  for (std::int64_t i = 1; i < host->numel(); ++i)
    found.push_back(host->const_data_ptr<double>()[i]);
  return found;
}

// Runs instructions one by one. Returns the arena's log of it, how far that reaches behind each,
// and the marks before the first and behind each.
py::tuple run_logged(Tape& tape, int start, int stop, Arena& arena, LaneDevice& device, Lane lane) {
  std::vector<Event> log;
  std::vector<std::size_t> ends;
  std::vector<Mark> marks;
  run_unlocked([&] {
    marks.push_back(device.mark(lane));
    for (int index = start; index < stop; ++index) {
      tape.run(index, index + 1);
      marks.push_back(device.mark(lane));
      const std::vector<Event> events = arena.take_log();
      log.insert(log.end(), events.begin(), events.end());
      ends.push_back(log.size());
    }
  });
  return py::make_tuple(as_array(log), ends, marks);
}

void bind_tape(py::module_& m) {
  // kWrapped is not there: whether a number becomes a tensor is the schema's to say.
  py::native_enum<Argument::Kind>(m, "ArgumentKind", "enum.IntEnum")
      .value("CONSTANT", Argument::Kind::kConstant)
      .value("SLOT", Argument::Kind::kSlot)
      .value("SLOTS", Argument::Kind::kSlots)
      .value("SCALAR", Argument::Kind::kScalar)
      .value("SCALARS", Argument::Kind::kScalars)
      .value("SINGLE", Argument::Kind::kSingle)
      .value("GENERATOR", Argument::Kind::kGenerator)
      .finalize();
  py::native_enum<Arithmetic>(m, "Arithmetic", "enum.Enum")
      .value("NEGATE", Arithmetic::kNegate)
      .value("ADD", Arithmetic::kAdd)
      .value("SUBTRACT", Arithmetic::kSubtract)
      .value("MULTIPLY", Arithmetic::kMultiply)
      .value("DIVIDE", Arithmetic::kDivide)
      .value("POWER", Arithmetic::kPower)
      .finalize();
  py::native_enum<MoveEnd>(m, "MoveEnd", "enum.Enum")
      .value("LEAVE", MoveEnd::kLeave)
      .value("GONE", MoveEnd::kGone)
      .value("FETCH", MoveEnd::kFetch)
      .value("BACK", MoveEnd::kBack)
      .finalize();
  py::class_<Tier, std::shared_ptr<Tier>>(m, "Tier")
      .def_static("memory", &Tier::memory, py::arg("size"))
      .def_static("file", &Tier::file, py::arg("folder"), py::arg("size"))
      .def_property_readonly("capacity", &Tier::capacity)
      .def_property_readonly("moved", &Tier::moved);
  py::class_<DeviceTier, std::shared_ptr<DeviceTier>>(m, "DeviceTier")
      .def(py::init([](std::shared_ptr<CudaDevice> device, std::size_t bytes, bool host_functions) {
             return std::make_shared<DeviceTier>(std::move(device), bytes, host_functions);
           }),
           py::arg("device"), py::arg("size"), py::arg("host_functions"),
           py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("capacity", &DeviceTier::capacity)
      .def_property_readonly("moved", &DeviceTier::moved);
  py::class_<Tape, std::shared_ptr<Tape>>(m, "Tape")
      .def(py::init<int, int>(), py::arg("slots"), py::arg("registers"))
      .def("add_operator", &add_operator)
      .def("add_load", &add_load)
      .def("add_read_scalar", &add_read_scalar)
      .def("add_read_loss", &add_read_loss)
      .def("add_arithmetic", &add_arithmetic)
      .def("add_move", &add_move, py::arg("end"), py::arg("value"), py::arg("slot"),
           py::arg("home"), py::arg("copies"))
      .def("set_tier",
           [](Tape& tape, std::shared_ptr<Tier> tier) { tape.away().set_tier(std::move(tier)); })
      .def("set_tier",
           [](Tape& tape, std::shared_ptr<DeviceTier> tier) {
             tape.away().set_tier(std::move(tier));
           })
      .def("keep_away",
           [](Tape& tape, int value, const at::Tensor& tensor) {
             return tape.away().keep_away(value, tensor);
           })
      .def("forget_away", [](Tape& tape) { run_unlocked([&] { tape.away().clear(); }); })
      .def("__len__", &Tape::size)
      .def("set_gradient_switches", &Tape::set_gradient_switches, py::arg("places"))
      .def("set_slot", &Tape::set_slot)
      .def("set_alias", [](Tape& tape, int slot,
                           const at::Tensor& tensor) { tape.set_slot(slot, tensor.detach()); })
      .def("slot", &Tape::slot)
      .def("set_register", &Tape::set_register)
      .def("set_batch", &Tape::set_batch)
      .def("set_generators", &Tape::set_generators, py::arg("host"), py::arg("device"))
      .def("set_transient", &Tape::set_transient)
      .def("clear", &Tape::clear)
      .def_property_readonly("loss", [](const Tape& tape) { return loss_of(tape.loss()); })
      .def_property_readonly(
          "metrics", [](const Tape& tape) { return metrics_of(tape.loss(), tape.metrics()); })
      .def("run",
           [](Tape& tape, int start, int stop) { run_unlocked([&] { tape.run(start, stop); }); })
      .def("run_logged", &run_logged, py::arg("start"), py::arg("stop"), py::arg("arena"),
           py::arg("device"), py::arg("lane"));
}

// Job, plan and tape travel as plain tuples: a round is made once per step.
using JobTuple = std::tuple<std::shared_ptr<Tape>, std::shared_ptr<MemoryPlan>, JobId,
                            std::shared_ptr<DeviceInput>>;

RoundJob make_job(const JobTuple& fields) {
  const auto& [tape, plan, id, device_input] = fields;
  return {tape, plan, id, device_input};
}

Round make_round(const py::list& jobs, const py::list& pairs) {
  Round round;
  for (auto item : jobs) round.jobs.push_back(make_job(py::cast<JobTuple>(item)));
  for (auto pair : pairs) {
    auto& tasks = round.pairs.emplace_back();
    for (auto item : py::cast<py::list>(pair)) {
      auto [lane, job, group, start, stop] = py::cast<std::tuple<int, int, int, int, int>>(item);
      tasks.push_back({lane, job, group, start, stop});
    }
  }
  return round;
}

std::shared_ptr<RoundResult> run_round(LanePool& pool, const Round& round) {
  auto result = std::make_shared<RoundResult>();
  run_unlocked([&] { *result = pool.run(round); });
  return result;
}

std::shared_ptr<RoundResult> run_step(LanePool& pool, int lane, const FlowStep& step, Gate& gate,
                                      const std::shared_ptr<RoundResult>& former) {
  auto result = std::make_shared<RoundResult>();
  run_unlocked([&] { *result = pool.run_step(lane, step, gate, former.get()); });
  return result;
}

// The error of any lane, the first if there are several, is raised when all are done.
void run_on_all(LanePool& pool, const py::function& work) {
  std::exception_ptr error;
  std::mutex mutex;
  run_unlocked([&] {
    pool.run_on_all([&](int lane) {
      try {
        py::gil_scoped_acquire acquire;
        work(lane);
      } catch (...) {
        std::lock_guard lock(mutex);
        if (!error) error = std::current_exception();
      }
    });
  });
  if (error) std::rethrow_exception(error);
}

py::list errors_of(const RoundResult& result) {
  py::list errors;
  for (const auto& error : result.errors) errors.append(python_exception(error));
  return errors;
}

py::list losses_of(const RoundResult& result) {
  py::list losses;
  for (const auto& loss : result.losses) losses.append(loss_of(loss));
  return losses;
}

std::vector<std::vector<double>> metrics_of(const RoundResult& result) {
  std::vector<std::vector<double>> metrics;
  for (std::size_t i = 0; i < result.losses.size(); ++i) {
    metrics.push_back(metrics_of(result.losses[i], result.metrics[i]));
  }
  return metrics;
}

py::list spans_of(const RoundResult& result) {
  py::list spans;
  for (const auto& span : result.spans) {
    spans.append(py::make_tuple(span.lane, span.job, span.group, result.device->seconds(span.start),
                                result.device->seconds(span.stop)));
  }
  return spans;
}

void bind_rounds(py::module_& m) {
  py::class_<Round>(m, "Round").def(py::init(&make_round), py::arg("jobs"), py::arg("pairs"));
  py::class_<FlowStep, std::shared_ptr<FlowStep>>(m, "FlowStep")
      .def(py::init([](const JobTuple& job, std::vector<std::pair<int, int>> groups,
                       std::shared_ptr<Demand> demand, std::vector<double> seconds,
                       std::shared_ptr<Throttle> throttle) {
             return std::make_shared<FlowStep>(FlowStep{make_job(job), std::move(groups),
                                                        std::move(demand), std::move(seconds),
                                                        std::move(throttle)});
           }),
           py::arg("job"), py::arg("groups"), py::arg("demand"),
           py::arg("seconds") = std::vector<double>{}, py::arg("throttle") = nullptr);
  py::class_<RoundResult, std::shared_ptr<RoundResult>>(m, "RoundResult")
      .def_property_readonly("errors", &errors_of)
      .def("wait",
           [](RoundResult& result) { run_unlocked([&] { result.device->wait(result.end); }); })
      .def("losses", &losses_of)
      .def("metrics", [](const RoundResult& result) { return metrics_of(result); })
      .def("spans", &spans_of);
  py::class_<LanePool>(m, "LanePool")
      .def(py::init<std::shared_ptr<Arena>, int, std::shared_ptr<LaneDevice>>(), py::arg("arena"),
           py::arg("lanes"), py::arg("device"))
      .def("serve", &LanePool::serve, py::call_guard<py::gil_scoped_release>())
      .def("run", &run_round)
      .def("run_on_all", &run_on_all, py::arg("work"))
      .def("run_step", &run_step, py::arg("lane"), py::arg("step"), py::arg("gate"),
           py::arg("former") = nullptr)
      .def("shutdown", &LanePool::shutdown, py::call_guard<py::gil_scoped_release>());
}

// References to a storage that its Python object stands for, once there is one: releases of PyTorch
// differ.
std::size_t uses_by_python_object() {
  const py::object probe = py::module_::import("torch").attr("empty")(1);
  probe.attr("untyped_storage")();
  return py::cast<at::Tensor>(probe).storage().use_count() - 1;
}

std::vector<at::Tensor> tensors_of(const py::list& tensors) {
  return py::cast<std::vector<at::Tensor>>(tensors);
}

void bind_parking(py::module_& m) {
  m.def(
      "parked_bytes", [](const py::list& tensors) { return parked_bytes(tensors_of(tensors)); },
      py::arg("tensors"));
  m.def(
      "park",
      [](const py::list& tensors, const std::shared_ptr<PinnedBuffer>& memory,
         const std::shared_ptr<Arena>& arena) {
        const auto held = tensors_of(tensors);
        run_unlocked([&] { park(held, memory, *arena); });
      },
      py::arg("tensors"), py::arg("memory"), py::arg("arena"));
  m.def("is_parked", [](const at::Tensor& tensor) { return is_parked(tensor); }, py::arg("tensor"));
  m.def(
      "unpark",
      [](const at::Tensor& tensor, const std::shared_ptr<Arena>& arena) {
        run_unlocked([&] { unpark(tensor, *arena); });
      },
      py::arg("tensor"), py::arg("arena"));
}

// How many refer to a tensor, and to its storage, from C++; the caller's own are among them.
std::pair<std::size_t, std::size_t> uses_of(const at::Tensor& tensor) {
  return {tensor.use_count(), tensor.storage().use_count()};
}

bool may_move_tensors(const py::list& tensors) {
  static const std::size_t own_uses = uses_by_python_object();
  tensors[0].attr("untyped_storage")();
  return may_move(py::cast<std::vector<at::Tensor>>(tensors), own_uses);
}

void bind_storage(py::module_& m) {
  py::class_<Reservation, std::shared_ptr<Reservation>>(m, "Reservation")
      .def_property_readonly("offset", &Reservation::offset)
      .def("move", &Reservation::move, py::arg("offset"), py::arg("job"));
  m.def("keep_in_place",
        [](const at::Tensor& tensor, const std::shared_ptr<Arena>& arena, JobId job) {
          std::shared_ptr<Reservation> room;
          run_unlocked([&] { room = keep_in_place(tensor, arena, job); }, takes_a_while(tensor));
          return room;
        });
  m.def("may_move", &may_move_tensors, py::arg("tensors"));
  m.def("uses_of", &uses_of, py::arg("tensor"));
  m.def("move_into_arena",
        [](const at::Tensor& tensor, const std::shared_ptr<Arena>& arena, JobId job) {
          run_unlocked([&] { move_into_arena(tensor, arena, job); }, takes_a_while(tensor));
        });
  m.def("move_out_of_arena", [](const at::Tensor& tensor, const std::shared_ptr<Arena>& arena) {
    run_unlocked([&] { move_out_of_arena(tensor, arena); }, takes_a_while(tensor));
  });
  m.def("move_within_arena", &move_within_arena, py::arg("tensor"), py::arg("arena"),
        py::arg("job"), py::arg("offset"));
  m.def("copy_in_arena",
        [](const at::Tensor& tensor, const std::shared_ptr<Arena>& arena, JobId job) {
          at::Tensor copy;
          run_unlocked([&] { copy = copy_in_arena(tensor, arena, job); }, takes_a_while(tensor));
          return copy;
        });
  m.def("is_in_arena",
        [](std::uintptr_t pointer) { return is_in_arena(reinterpret_cast<const void*>(pointer)); });
}

// Makes an object of a subclass of torch.Generator stand for another generator: given to an
// operator, it is that one.
void alias_generator(const py::object& alias, const at::Generator& generator) {
  TORCH_CHECK(THPGenerator_Check(alias.ptr()) == 1, "alias_generator wants a torch.Generator");
  reinterpret_cast<THPGenerator*>(alias.ptr())->cdata = generator;
}

}  // namespace

void bind_torch(py::module_& m) {
  prepare_random_scopes();
  bind_device(m);
  m.def("install_lane_allocator", &install_lane_allocator);
  m.def("set_intra_op_threads", &set_intra_op_threads, py::arg("count"));
  m.def("release_intra_op_threads", [] {
    bool released = false;
    run_unlocked([&] { released = release_intra_op_threads(); }, at::get_num_threads() > 1);
    return released;
  });
  m.def("register_arena", &register_arena);
  m.def("retire_arena", &retire_arena);
  m.def("set_job_name", &set_job_name);
  m.def("has_plain_bits", &has_plain_bits, py::arg("tensor"));
  m.def("has_same_bits", &has_same_bits, py::arg("left"), py::arg("right"));
  m.def("tensor_flags", &tensor_flags, py::arg("tensor"));
  m.def("has_plain_rows", &has_plain_rows, py::arg("tensor"));
  m.def("select_rows", &select_rows, py::arg("tensors"), py::arg("subsets"), py::arg("indices"));
  py::class_<LaneManager>(m, "LaneScope")
      .def(py::init([](std::shared_ptr<Arena> arena, int lane, int job,
                       std::optional<py::function> more, std::shared_ptr<Arena> whole) {
             auto maker = more ? room_maker(std::move(*more)) : nullptr;
             return LaneManager(LaneContext{std::move(arena), lane, job, nullptr, std::move(maker),
                                            nullptr, nullptr, std::move(whole)});
           }),
           py::arg("arena"), py::arg("lane"), py::arg("job"), py::arg("more") = py::none(),
           py::arg("whole") = py::none())
      .def("__enter__", &LaneManager::enter)
      .def("__exit__", &LaneManager::exit);
  py::class_<ThreadState>(m, "ThreadState").def(py::init<>());
  py::class_<ThreadModes>(m, "ThreadModes").def(py::init<>()).def(py::self == py::self);
  m.def("thread_settings", [] {
    const ThreadSettings here = ThreadSettings::here();
    return py::make_tuple(here.intra_op, here.flushes, here.autocasts);
  });
  py::class_<ThreadStateManager>(m, "ThreadStateScope")
      .def(py::init([](const ThreadState& state) { return ThreadStateManager(state); }),
           py::arg("state"))
      .def("__enter__", &ThreadStateManager::enter)
      .def("__exit__", &ThreadStateManager::exit);
  py::class_<RandomManager>(m, "RandomScope")
      .def(py::init([](at::Generator host, std::optional<at::Generator> device) {
             return RandomManager(std::move(host), std::move(device));
           }),
           py::arg("host"), py::arg("device"))
      .def("__enter__", &RandomManager::enter)
      .def("__exit__", &RandomManager::exit);
  m.def("alias_generator", &alias_generator, py::arg("alias"), py::arg("generator"));
  bind_storage(m);
  bind_parking(m);
  bind_tape(m);
  bind_rounds(m);
  bind_trains(m);
}

}  // namespace waterflow
