#include "account/look.h"

#include <utility>

#include "account/guards.h"

namespace py = pybind11;

namespace waterflow {
namespace {

// The calling thread's context is a copy of these variables: the look cannot change them.
class VariablesScope {
 public:
  explicit VariablesScope(PyObject* variables)
      : copy_(py::reinterpret_steal<py::object>(PyContext_Copy(variables))) {
    entered_ = copy_ && PyContext_Enter(copy_.ptr()) == 0;
    if (!entered_) PyErr_Clear();
  }
  ~VariablesScope() {
    if (entered_ && PyContext_Exit(copy_.ptr()) != 0) PyErr_Clear();
  }
  VariablesScope(const VariablesScope&) = delete;
  VariablesScope& operator=(const VariablesScope&) = delete;
  bool entered() const { return entered_; }

 private:
  py::object copy_;
  bool entered_;
};

void collected(PyHeapTypeObject* heap_type) {
  PyTypeObject* type = &heap_type->ht_type;
  type->tp_flags |= Py_TPFLAGS_HAVE_GC;
  type->tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (py::detail::is_holder_constructed(self)) {
      const auto& look = py::cast<Look&>(py::handle(self));
      Py_VISIT(look.guards());
      Py_VISIT(look.variables());
    }
    return 0;
  };
  type->tp_clear = [](PyObject* self) {
    if (py::detail::is_holder_constructed(self)) py::cast<Look&>(py::handle(self)).clear();
    return 0;
  };
}

}  // namespace

Look::Look(py::list guards, py::object variables)
    : guards_(std::move(guards)), variables_(std::move(variables)) {
  for (py::handle one : guards_) {
    if (!py::isinstance<Guards>(one)) throw py::type_error("a look takes Guards");
  }
  if (!PyContext_CheckExact(variables_.ptr())) throw py::type_error("a look takes a Context");
}

bool Look::holds() const {
  const VariablesScope scope(variables_.ptr());
  if (!scope.entered()) return false;
  for (py::handle one : guards_) {
    if (!py::cast<Guards&>(one).holds()) return false;
  }
  return true;
}

void Look::clear() {
  guards_ = py::list();
  variables_ = py::none();
}

void bind_look(py::module_& m) {
  py::class_<Look>(m, "Look", py::custom_type_setup(collected))
      .def(py::init<py::list, py::object>(), py::arg("guards"), py::arg("variables"))
      .def("holds", &Look::holds);
}

}  // namespace waterflow
