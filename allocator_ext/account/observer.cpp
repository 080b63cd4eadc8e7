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

py::object code_of(PyFrameObject* frame) {
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
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
  py::object code = code_of(frame);
  if (codes_.emplace(code.ptr(), code).second) order_.push_back(code);
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
py::object Observer::responsible(PyFrameObject* frame) {
  auto current = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(frame));
  if (see_through_.is_none()) return current;
  while (is_transparent(code_of(reinterpret_cast<PyFrameObject*>(current.ptr())).ptr())) {
    auto* back = PyFrame_GetBack(reinterpret_cast<PyFrameObject*>(current.ptr()));
    if (back == nullptr) break;
    current = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(back));
  }
  return current;
}

void Observer::called(PyFrameObject* frame, PyObject* function) {
  py::object responsible_frame = responsible(frame);
  auto* caller_frame = reinterpret_cast<PyFrameObject*>(responsible_frame.ptr());
  py::object caller = code_of(caller_frame);
  // Bound methods are made anew at every call; their definition is one.
  const void* definition = reinterpret_cast<PyCFunctionObject*>(function)->m_ml;
  // The caller is kept alive by its entry, so that its address stays its own.
  if (!seen_.emplace(std::make_pair(definition, caller.ptr()), calls_.size()).second) return;
  calls_.push_back({unbound(function), std::move(caller), PyFrame_GetLineNumber(caller_frame)});
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
