#include "account/observer.h"

#include <frameobject.h>

#include <stdexcept>
#include <string>

#include "account/checks.h"

namespace py = pybind11;

namespace waterflow {
namespace {

constexpr const char* kCapsule = "waterflow.Observer";

// The built-in method of a class, or of one of its bases, that has this definition.
PyObject* method_of(PyTypeObject* type, PyMethodDef* definition) {
  const py::str name(definition->ml_name);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(type->tp_mro); ++i) {
    auto* base = reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(type->tp_mro, i));
    PyObject* method = PyDict_GetItemWithError(class_dict(base).ptr(), name.ptr());
    if (method != nullptr && Py_TYPE(method) == &PyMethodDescr_Type &&
        reinterpret_cast<PyMethodDescrObject*>(method)->d_method == definition) {
      return method;
    }
  }
  return nullptr;
}

// A method called on an object arrives bound to it. Keeping that would keep the object (a tensor)
// alive, so the method of its class is kept instead; functions of modules and classes stay.
py::object unbound(PyObject* function) {
  auto* bound = reinterpret_cast<PyCFunctionObject*>(function);
  PyObject* self = bound->m_self;
  if (self != nullptr && !PyModule_Check(self) && !PyType_Check(self)) {
    PyObject* method = method_of(Py_TYPE(self), bound->m_ml);
    if (method != nullptr) return py::reinterpret_borrow<py::object>(method);
  }
  return py::reinterpret_borrow<py::object>(function);
}

py::object code_of(const py::object& frame) {
  auto* code = PyFrame_GetCode(reinterpret_cast<PyFrameObject*>(frame.ptr()));
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(code));
}

py::object caller_of(const py::object& frame) {
  auto* back = PyFrame_GetBack(reinterpret_cast<PyFrameObject*>(frame.ptr()));
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(back));
}

// The functions of Python's import system in which all that happens is part of an import, and
// those in which a module is looked for, perhaps without one.
struct ImportSystem {
  py::object imports;
  py::object looks;

  static const ImportSystem& get() {
    // Never freed: the interpreter may be gone before static objects are.
    static const auto* system = [] {
      const py::module_ bootstrap = py::module_::import("importlib._bootstrap");
      return new ImportSystem{bootstrap.attr("_find_and_load").attr("__code__"),
                              bootstrap.attr("_find_spec").attr("__code__")};
    }();
    return *system;
  }
};

// What a frame is to the import system.
struct PartInImport {
  bool imports = false;  // a module that is not there yet
  py::object looks;      // the outermost frame that looks for one, null if none does
};

PartInImport part_in_import(py::object frame) {
  const ImportSystem& system = ImportSystem::get();
  PartInImport part;
  for (; frame; frame = caller_of(frame)) {
    const py::object code = code_of(frame);
    if (code.is(system.imports)) {
      part.imports = true;
      break;
    }
    if (code.is(system.looks)) part.looks = frame;
    // A module's body: what it does is the module's.
    auto* name = reinterpret_cast<PyCodeObject*>(code.ptr())->co_name;
    if (PyUnicode_CompareWithASCIIString(name, "<module>") == 0) break;
  }
  return part;
}

}  // namespace

Observer::~Observer() {
  if (active_) PyEval_SetProfile(nullptr, nullptr);  // never left: nothing can be restored here
}

void Observer::enter() {
  if (active_) throw std::runtime_error("this Observer observes already; make another one");
  PyThreadState* thread = PyThreadState_Get();
  former_ = thread->c_profilefunc;
  former_argument_ = py::reinterpret_borrow<py::object>(thread->c_profileobj);
  thread_ = PyThread_get_thread_ident();
  active_ = true;
  PyEval_SetProfile(&Observer::on_event, py::capsule(this, kCapsule).ptr());
}

void Observer::exit() {
  if (!active_) return;
  if (PyThread_get_thread_ident() != thread_) {
    throw std::runtime_error("an Observer must be left on the thread that entered it");
  }
  active_ = false;
  PyEval_SetProfile(former_, former_argument_.ptr());
  former_argument_ = py::object();
}

int Observer::on_event(PyObject* self, PyFrameObject* frame, int what, PyObject* argument) {
  auto* observer = static_cast<Observer*>(PyCapsule_GetPointer(self, kCapsule));
  if (!observer->active_) return 0;
  try {
    if (what == PyTrace_CALL) {
      observer->entered(frame);
    } else if (what == PyTrace_C_CALL && PyCFunction_Check(argument)) {
      observer->called(frame, argument);
    }
  } catch (py::error_already_set& error) {
    error.restore();  // from `see_through`
    return -1;
  }
  return observer->former_ != nullptr
             ? observer->former_(observer->former_argument_.ptr(), frame, what, argument)
             : 0;
}

void Observer::entered(PyFrameObject* frame) {
  auto entering = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(frame));
  py::object code = code_of(entering);
  if (codes_.count(code.ptr()) != 0) return;
  const PartInImport part = part_in_import(std::move(entering));
  if (part.imports || part.looks) return;
  codes_.emplace(code.ptr(), code);
  order_.push_back(code);
}

bool Observer::is_transparent(PyObject* code) {
  auto found = transparent_.find(code);
  if (found == transparent_.end()) {
    auto owned = py::reinterpret_borrow<py::object>(code);
    const bool answer = py::cast<bool>(see_through_(owned));
    found = transparent_.emplace(code, std::make_pair(owned, answer)).first;
  }
  return found->second.second;
}

// The innermost frame whose code is not seen through; the outermost if there is none.
py::object Observer::responsible(py::object frame) {
  if (see_through_.is_none()) return frame;
  while (is_transparent(code_of(frame).ptr())) {
    py::object back = caller_of(frame);
    if (!back) break;
    frame = std::move(back);
  }
  return frame;
}

void Observer::called(PyFrameObject* frame, PyObject* function) {
  auto calling = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(frame));
  py::object caller_frame = responsible(calling);
  // Bound methods are made anew at every call; their definition is one.
  const void* definition = reinterpret_cast<PyCFunctionObject*>(function)->m_ml;
  if (has_called(definition, caller_frame)) return;
  const PartInImport part = part_in_import(calling);
  if (part.imports) return;
  if (part.looks) {
    // Whoever has it looked for asks the files, and not the hooks that do.
    caller_frame = responsible(caller_of(part.looks));
    if (has_called(definition, caller_frame)) return;
  }
  // The caller is kept alive by its entry, so that its address stays its own.
  py::object caller = code_of(caller_frame);
  seen_.insert({definition, caller.ptr()});
  const int line = PyFrame_GetLineNumber(reinterpret_cast<PyFrameObject*>(caller_frame.ptr()));
  calls_.push_back({unbound(function), std::move(caller), line});
}

bool Observer::has_called(const void* definition, const py::object& caller) const {
  return seen_.count({definition, code_of(caller).ptr()}) != 0;
}

py::list Observer::codes() const {
  py::list found;
  for (const py::object& code : order_) found.append(code);
  return found;
}

py::list Observer::calls() const {
  const py::str own_module("waterflow.allocator_ext._C");
  py::list found;
  for (const Call& call : calls_) {
    // Newer versions of Python report the call that ends the observation, too.
    if (py::str(call.function.attr("__name__")).equal(py::str("__exit__")) &&
        py::getattr(call.function, "__module__", py::none()).equal(own_module)) {
      continue;
    }
    found.append(py::make_tuple(call.function, call.caller, call.line));
  }
  return found;
}

void bind_observer(py::module_& m) {
  py::class_<Observer>(m, "Observer", "Records the code that runs and the C functions it calls.")
      .def(py::init<py::object>(), py::arg("see_through") = py::none())
      .def(
          "__enter__",
          [](Observer& observer) -> Observer& {
            observer.enter();
            return observer;
          },
          py::return_value_policy::reference)
      .def("__exit__", [](Observer& observer, const py::args&) { observer.exit(); })
      .def("codes", &Observer::codes)
      .def("calls", &Observer::calls);
}

}  // namespace waterflow
