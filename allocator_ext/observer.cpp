#include "observer.h"

#include <frameobject.h>

#include <stdexcept>
#include <string>

namespace py = pybind11;

namespace waterflow {
namespace {

constexpr const char* kCapsule = "waterflow.Observer";

// A method called on an object arrives bound to it. Keeping that would keep the object (a tensor)
// alive, so the method of its class is kept instead; functions of modules and classes stay.
py::object unbound(PyObject* function) {
  auto* bound = reinterpret_cast<PyCFunctionObject*>(function);
  PyObject* self = bound->m_self;
  if (self == nullptr || PyModule_Check(self) || PyType_Check(self)) {
    return py::reinterpret_borrow<py::object>(function);
  }
  PyObject* method = _PyType_Lookup(Py_TYPE(self), py::str(bound->m_ml->ml_name).ptr());
  if (method != nullptr && Py_TYPE(method) == &PyMethodDescr_Type &&
      reinterpret_cast<PyMethodDescrObject*>(method)->d_method == bound->m_ml) {
    return py::reinterpret_borrow<py::object>(method);
  }
  return py::reinterpret_borrow<py::object>(function);
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
  if (what == PyTrace_CALL) {
    observer->entered(frame);
  } else if (what == PyTrace_C_CALL && PyCFunction_Check(argument)) {
    observer->called(frame, argument);
  }
  return observer->former_ != nullptr
             ? observer->former_(observer->former_argument_.ptr(), frame, what, argument)
             : 0;
}

void Observer::entered(PyFrameObject* frame) {
  auto code =
      py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
  if (codes_.emplace(code.ptr(), code).second) order_.push_back(code);
}

void Observer::called(PyFrameObject* frame, PyObject* function) {
  auto caller =
      py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
  // Bound methods are made anew at every call; their definition is one.
  const void* definition = reinterpret_cast<PyCFunctionObject*>(function)->m_ml;
  // The caller is kept alive by its entry, so that its address stays its own.
  if (!seen_.emplace(std::make_pair(definition, caller.ptr()), calls_.size()).second) return;
  calls_.push_back({unbound(function), std::move(caller), PyFrame_GetLineNumber(frame)});
}

py::list Observer::codes() const {
  py::list found;
  for (const py::object& code : order_) found.append(code);
  return found;
}

py::list Observer::calls() const {
  py::list found;
  for (const Call& call : calls_) {
    found.append(py::make_tuple(call.function, call.caller, call.line));
  }
  // The last call of the observed code is that of the observer's own exit.
  return found;
}

void bind_observer(py::module_& m) {
  py::class_<Observer>(m, "Observer", "Records the code that runs and the C functions it calls.")
      .def(py::init<>())
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
