#include "account/guards.h"

#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <stdexcept>

#include "account/flags.h"

namespace py = pybind11;

namespace waterflow {
namespace {

py::object borrowed(PyObject* object) { return py::reinterpret_borrow<py::object>(object); }

PyObject* set_or_null(const py::object& set) {
  if (set.is_none()) return nullptr;
  if (!PyAnySet_Check(set.ptr())) throw py::type_error("names and skipped are sets, or None");
  return set.ptr();
}

void require(bool fits, const char* what) {
  if (!fits) throw py::type_error(what);
}

}  // namespace

PyObject* Guards::hold(const py::object& object) {
  held_.append(object);
  return object.ptr();
}

template <typename Kind, typename... Arguments>
Kind& Guards::add(Arguments... arguments) {
  auto check = std::make_unique<Kind>(arguments...);
  Kind& added = *check;
  checks_.push_back(std::move(check));
  return added;
}

template <typename Entries>
py::list Guards::hold_entries(const Entries& entries) {
  py::list found;
  for (const auto& [key, value] : entries) {
    auto held_key = py::reinterpret_borrow<py::object>(key);
    hold(held_key);
    hold(borrowed(value));
    found.append(py::make_tuple(held_key, borrowed(value)));
  }
  return found;
}

py::list Guards::attributes(py::object holder, py::object names, py::object skipped) {
  const Watched watched{set_or_null(names), set_or_null(skipped), false};
  hold(names);
  hold(skipped);
  return hold_entries(add<AttributesCheck>(hold(holder), watched).space().entries());
}

py::list Guards::type(py::object type, py::object names, py::object skipped) {
  require(PyType_Check(type.ptr()), "type() takes a class");
  const Watched watched{set_or_null(names), set_or_null(skipped), true};
  hold(names);
  hold(skipped);
  auto* checked = reinterpret_cast<PyTypeObject*>(hold(type));
  hold(borrowed(checked->tp_mro));
  if (const PyHeapTypeObject* made = heap_type(checked)) {
    hold(borrowed(made->ht_name));
    hold(borrowed(made->ht_qualname));
  }
  return hold_entries(add<TypeCheck>(checked, watched).space().entries());
}

void Guards::keys(py::dict dict, const py::list& keys) {
  std::vector<PyObject*> wanted;
  for (py::handle key : keys) {
    require(PyUnicode_CheckExact(key.ptr()), "keys() takes names");
    wanted.push_back(hold(borrowed(key.ptr())));
    if (PyObject* value = PyDict_GetItemWithError(dict.ptr(), key.ptr())) hold(borrowed(value));
  }
  add<KeysCheck>(hold(dict), wanted);
}

py::list Guards::mapping(py::dict dict, py::object skipped) {
  hold(skipped);
  auto& check = add<MappingCheck>(hold(dict), set_or_null(skipped));
  return hold_entries(check.entries());
}

void Guards::empties(const py::list& dicts) {
  std::vector<PyObject*> empty;
  for (py::handle dict : dicts) {
    require(PyDict_Check(dict.ptr()) && PyDict_GET_SIZE(dict.ptr()) == 0,
            "empties() takes empty dictionaries");
    empty.push_back(hold(borrowed(dict.ptr())));
  }
  add<EmptiesCheck>(empty);
}

py::list Guards::items(py::object container, py::object base) {
  require(PyType_Check(base.ptr()) && PyObject_IsInstance(container.ptr(), base.ptr()) == 1,
          "items() takes a container and its built-in base");
  auto* type = reinterpret_cast<PyTypeObject*>(base.ptr());
  require(type->tp_iter != nullptr, "items() takes a base that can be iterated");
  py::list found;
  for (PyObject* item : add<ItemsCheck>(hold(container), type).items()) {
    hold(borrowed(item));
    found.append(borrowed(item));
  }
  return found;
}

py::list Guards::cell(py::object cell) {
  require(PyCell_Check(cell.ptr()), "cell() takes a closure's cell");
  py::list found;
  if (PyObject* value = PyCell_GET(cell.ptr())) {
    hold(borrowed(value));
    found.append(borrowed(value));
  }
  add<CellCheck>(hold(cell));
  return found;
}

void Guards::function(py::object function) {
  require(PyFunction_Check(function.ptr()), "function() takes a Python function");
  for (PyObject* part : FunctionCheck::parts_of(function.ptr())) {
    if (part != nullptr) hold(borrowed(part));
  }
  add<FunctionCheck>(hold(function));
}

void Guards::functions(const py::list& functions) {
  std::vector<PyObject*> found;
  for (py::handle each : functions) {
    require(PyFunction_Check(each.ptr()), "functions() takes Python functions");
    found.push_back(hold(borrowed(each.ptr())));
    hold(borrowed(PyFunction_GET_CODE(each.ptr())));
    if (PyObject* defaults = PyFunction_GET_DEFAULTS(each.ptr())) hold(borrowed(defaults));
  }
  add<FunctionsCheck>(found);
}

py::list Guards::slot(py::object holder, py::object descriptor) {
  require(Py_TYPE(descriptor.ptr()) == &PyMemberDescr_Type, "slot() takes a slot's descriptor");
  py::object value = SlotCheck::read(holder.ptr(), descriptor.ptr());
  py::list found;
  if (value) found.append(value);
  hold(found);
  add<SlotCheck>(hold(holder), hold(descriptor), value.ptr());
  return found.attr("copy")();
}

void Guards::tensor(py::object tensor) {
  require(THPVariable_Check(tensor.ptr()), "tensor() takes a tensor");
  add<TensorCheck>(hold(tensor));
}

void Guards::buffer(py::object object) { add<BufferCheck>(hold(object)); }

void Guards::flags(py::object type, py::object function) {
  require(PyType_Check(type.ptr()), "flags() takes a class");
  py::object expected = function(type);
  auto* checked = reinterpret_cast<PyTypeObject*>(hold(type));
  PyObject* held = hold(function);
  add<FlagsCheck>(checked, held, hold(expected));
}

void Guards::probe(py::object function, py::object object, py::object expected) {
  add<ProbeCheck>(hold(function), hold(object), hold(expected));
}

bool Guards::holds() {
  for (const auto& check : checks_) {
    if (!check->holds(nullptr)) return false;
  }
  return true;
}

py::object Guards::difference() {
  for (std::size_t i = 0; i < checks_.size(); ++i) {
    Part part;
    if (!checks_[i]->holds(&part)) return py::make_tuple(i, part);
  }
  return py::none();
}

py::list Guards::differences() {
  py::list found;
  for (std::size_t i = 0; i < checks_.size(); ++i) {
    Part part;
    if (!checks_[i]->holds(&part)) found.append(py::make_tuple(i, part));
  }
  return found;
}

void Guards::clear() {
  checks_.clear();
  held_ = py::list();
}

namespace {

// The interpreter's collector sees what the checks refer to, so that cycles through them end.
void collected(PyHeapTypeObject* heap_type) {
  PyTypeObject* type = &heap_type->ht_type;
  type->tp_flags |= Py_TPFLAGS_HAVE_GC;
  type->tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (py::detail::is_holder_constructed(self)) {
      Py_VISIT(py::cast<Guards&>(py::handle(self)).held());
    }
    return 0;
  };
  type->tp_clear = [](PyObject* self) {
    if (py::detail::is_holder_constructed(self)) py::cast<Guards&>(py::handle(self)).clear();
    return 0;
  };
}

}  // namespace

void bind_guards(py::module_& m) {
  m.def("instance_dict", [](const py::object& object) -> py::object {
    py::object dict = instance_dict(object.ptr());
    return dict ? dict : py::none();
  });
  m.def("same_value", [](const py::object& left, const py::object& right) {
    return same_value(left.ptr(), right.ptr());
  });
  py::class_<Guards>(m, "Guards", py::custom_type_setup(collected))
      .def(py::init<>())
      .def("attributes", &Guards::attributes)
      .def("type", &Guards::type)
      .def("keys", &Guards::keys)
      .def("mapping", &Guards::mapping)
      .def("empties", &Guards::empties)
      .def("items", &Guards::items)
      .def("cell", &Guards::cell)
      .def("function", &Guards::function)
      .def("functions", &Guards::functions)
      .def("slot", &Guards::slot)
      .def("tensor", &Guards::tensor)
      .def("buffer", &Guards::buffer)
      .def("flags", &Guards::flags)
      .def("probe", &Guards::probe)
      .def("holds", &Guards::holds)
      .def("difference", &Guards::difference)
      .def("differences", &Guards::differences)
      .def("__len__", &Guards::size);
}

}  // namespace waterflow
