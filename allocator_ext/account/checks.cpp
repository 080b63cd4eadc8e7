#include "account/checks.h"

#include <structmember.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Size.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>

namespace py = pybind11;

namespace waterflow {
namespace {

py::object borrowed(PyObject* object) { return py::reinterpret_borrow<py::object>(object); }

// The answer of a call that says -1 for an error: looking leaves none behind.
bool quiet(int answer) {
  if (answer < 0) PyErr_Clear();
  return answer > 0;
}

PyObject* lookup(PyObject* dict, PyObject* key) {
  PyObject* value = PyDict_GetItemWithError(dict, key);
  if (value == nullptr) PyErr_Clear();
  return value;
}

bool differs_at(Part* part, PyObject* key) {
  if (part != nullptr) *part = key != nullptr ? borrowed(key) : py::none();
  return false;
}

bool same_bits(double left, double right) { return std::memcmp(&left, &right, sizeof left) == 0; }

bool same_items(PyObject* expected, PyObject* actual) {
  const Py_ssize_t size = PyTuple_GET_SIZE(expected);
  if (size != PyTuple_GET_SIZE(actual)) return false;
  for (Py_ssize_t i = 0; i < size; ++i) {
    if (!same_value(PyTuple_GET_ITEM(expected, i), PyTuple_GET_ITEM(actual, i))) return false;
  }
  return true;
}

bool same_complex(PyObject* expected, PyObject* actual) {
  const Py_complex left = PyComplex_AsCComplex(expected);
  const Py_complex right = PyComplex_AsCComplex(actual);
  return same_bits(left.real, right.real) && same_bits(left.imag, right.imag);
}

// numpy's scalars; its arrays are not values.
bool is_scalar(PyTypeObject* type) {
  return std::strncmp(type->tp_name, "numpy.", 6) == 0 &&
         std::strcmp(type->tp_name, "numpy.ndarray") != 0 && type->tp_as_buffer != nullptr;
}

// The memory of an object, for as long as this lives.
struct Memory {
  Memory(PyObject* object, int flags) {
    valid = PyObject_GetBuffer(object, &view, flags) == 0;
    if (!valid) PyErr_Clear();
  }
  ~Memory() {
    if (valid) PyBuffer_Release(&view);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  std::string_view bytes() const {
    return {static_cast<const char*>(view.buf), static_cast<std::size_t>(view.len)};
  }

  Py_buffer view{};
  bool valid;
};

bool same_memory(PyObject* expected, PyObject* actual) {
  const Memory left(expected, PyBUF_SIMPLE);
  const Memory right(actual, PyBUF_SIMPLE);
  return left.valid && right.valid && left.bytes() == right.bytes();
}

bool same_method(PyObject* expected, PyObject* actual) {
  return PyMethod_GET_FUNCTION(expected) == PyMethod_GET_FUNCTION(actual) &&
         PyMethod_GET_SELF(expected) == PyMethod_GET_SELF(actual);
}

bool same_builtin(PyObject* expected, PyObject* actual) {
  auto* left = reinterpret_cast<PyCFunctionObject*>(expected);
  auto* right = reinterpret_cast<PyCFunctionObject*>(actual);
  return left->m_ml == right->m_ml && left->m_self == right->m_self;
}

bool is_dunder(PyObject* key) {
  const Py_ssize_t size = PyUnicode_GET_LENGTH(key);
  if (size < 5 || PyUnicode_KIND(key) != PyUnicode_1BYTE_KIND) return false;
  const Py_UCS1* text = PyUnicode_1BYTE_DATA(key);
  return text[0] == '_' && text[1] == '_' && text[size - 1] == '_' && text[size - 2] == '_';
}

}  // namespace

bool same_value(PyObject* expected, PyObject* actual) {
  if (expected == actual) return true;
  if (expected == nullptr || actual == nullptr) return false;
  PyTypeObject* type = Py_TYPE(expected);
  if (type != Py_TYPE(actual)) return false;
  if (type == &PyFloat_Type) {
    return same_bits(PyFloat_AS_DOUBLE(expected), PyFloat_AS_DOUBLE(actual));
  }
  if (type == &PyLong_Type || type == &PyUnicode_Type || type == &PyBytes_Type ||
      type == &PyRange_Type || type == &THPDeviceType) {
    return quiet(PyObject_RichCompareBool(expected, actual, Py_EQ));
  }
  if (type == &PyTuple_Type || type == &THPSizeType) {
    return same_items(expected, actual);
  }
  if (type == &PyMethod_Type) return same_method(expected, actual);
  if (type == &PyCFunction_Type) return same_builtin(expected, actual);
  if (type == &PyComplex_Type) return same_complex(expected, actual);
  return is_scalar(type) && same_memory(expected, actual);
}

py::object instance_dict(PyObject* object) {
  if (PyType_HasFeature(Py_TYPE(object), Py_TPFLAGS_MANAGED_DICT)) {
    PyObject* dict = PyObject_GenericGetDict(object, nullptr);
    if (dict == nullptr) PyErr_Clear();
    return py::reinterpret_steal<py::object>(dict);
  }
  if (Py_TYPE(object)->tp_dictoffset == 0) return {};
  PyObject** place = _PyObject_GetDictPtr(object);
  return borrowed(place != nullptr ? *place : nullptr);
}

unsigned version_of(PyTypeObject* type) {
#if PY_VERSION_HEX >= 0x030C0000
  PyUnstable_Type_AssignVersionTag(type);
#else
  static PyObject* const name = PyUnicode_InternFromString("__init__");
  _PyType_Lookup(type, name);  // looking up assigns one
#endif
  return type->tp_version_tag;
}

PyHeapTypeObject* heap_type(PyTypeObject* type) {
  const bool made = PyType_HasFeature(type, Py_TPFLAGS_HEAPTYPE);
  return made ? reinterpret_cast<PyHeapTypeObject*>(type) : nullptr;
}

py::object class_dict(PyTypeObject* type) {
#if PY_VERSION_HEX >= 0x030C0000
  return py::reinterpret_steal<py::object>(PyType_GetDict(type));
#else
  return borrowed(type->tp_dict);
#endif
}

bool Watched::operator()(PyObject* key) const {
  if (!PyUnicode_CheckExact(key)) return false;
  if (skipped != nullptr && quiet(PySet_Contains(skipped, key))) return false;
  if (names == nullptr || quiet(PySet_Contains(names, key))) return true;
  return dunders && is_dunder(key);
}

Namespace::Namespace(PyObject* dict, Watched watched) : watched_(watched) {
  PyObject *key, *value;
  Py_ssize_t position = 0;
  while (dict != nullptr && PyDict_Next(dict, &position, &key, &value)) {
    if (watched_(key)) entries_.emplace_back(borrowed(key), value);
  }
  remember_order(dict);
}

bool Namespace::holds(PyObject* dict, Part* part) {
  if (dict == nullptr) return entries_.empty() || differs_at(part, entries_.front().first.ptr());
  if (version_.is_of(dict)) return true;
  if (!in_order(dict)) {
    if (!by_key(dict, part)) return false;
    remember_order(dict);  // names that do not count have come or gone
  }
  version_.remember(dict);
  return true;
}

bool Namespace::in_order(PyObject* dict) const {
  if (PyDict_GET_SIZE(dict) != static_cast<Py_ssize_t>(order_.size())) return false;
  PyObject *key, *value;
  Py_ssize_t position = 0;
  for (const auto& [name, expected] : order_) {
    if (!PyDict_Next(dict, &position, &key, &value) || key != name.ptr()) return false;
    if (expected != nullptr && !same_value(expected, value)) return false;
  }
  return true;
}

bool Namespace::by_key(PyObject* dict, Part* part) const {
  for (const auto& [name, expected] : entries_) {
    if (!same_value(expected, lookup(dict, name.ptr()))) return differs_at(part, name.ptr());
  }
  PyObject *key, *value;
  Py_ssize_t position = 0;
  while (PyDict_Next(dict, &position, &key, &value)) {
    if (watched_(key) && expected(key) == nullptr) return differs_at(part, key);
  }
  return true;
}

PyObject* Namespace::expected(PyObject* key) const {
  for (const auto& [name, value] : entries_) {
    if (name.ptr() == key || quiet(PyObject_RichCompareBool(name.ptr(), key, Py_EQ))) return value;
  }
  return nullptr;
}

void Namespace::remember_order(PyObject* dict) {
  order_.clear();
  PyObject *key, *value;
  Py_ssize_t position = 0;
  while (dict != nullptr && PyDict_Next(dict, &position, &key, &value)) {
    order_.emplace_back(borrowed(key), watched_(key) ? expected(key) : nullptr);
  }
}

AttributesCheck::AttributesCheck(PyObject* holder, Watched watched)
    : holder_(holder), type_(Py_TYPE(holder)), space_(instance_dict(holder).ptr(), watched) {}

bool AttributesCheck::holds(Part* part) {
  if (Py_TYPE(holder_) != type_) return differs_at(part, py::str("__class__").ptr());
  return space_.holds(instance_dict(holder_).ptr(), part);
}

TypeCheck::TypeCheck(PyTypeObject* type, Watched watched)
    : type_(type),
      metaclass_(Py_TYPE(type)),
      order_(type->tp_mro),
      name_(heap_type(type) ? heap_type(type)->ht_name : nullptr),
      qualified_name_(heap_type(type) ? heap_type(type)->ht_qualname : nullptr),
      tag_(version_of(type)),
      space_(class_dict(type).ptr(), watched) {}

bool TypeCheck::holds(Part* part) {
  if (Py_TYPE(type_) != metaclass_) return differs_at(part, py::str("__class__").ptr());
  if (name_ != nullptr) {  // given another, a class is no new version
    if (!same_value(name_, heap_type(type_)->ht_name)) {
      return differs_at(part, py::str("__name__").ptr());
    }
    if (!same_value(qualified_name_, heap_type(type_)->ht_qualname)) {
      return differs_at(part, py::str("__qualname__").ptr());
    }
  }
  if (tag_ != 0 && type_->tp_version_tag == tag_) return true;
  if (!same_value(order_, type_->tp_mro)) return differs_at(part, py::str("__bases__").ptr());
  if (!space_.holds(class_dict(type_).ptr(), part)) return false;
  tag_ = version_of(type_);
  return true;
}

KeysCheck::KeysCheck(PyObject* dict, const std::vector<PyObject*>& keys) : dict_(dict) {
  entries_.reserve(keys.size());
  for (PyObject* key : keys) entries_.emplace_back(key, lookup(dict, key));
}

bool KeysCheck::holds(Part* part) {
  for (const auto& [key, value] : entries_) {
    if (!same_value(value, lookup(dict_, key))) return differs_at(part, key);
  }
  return true;
}

MappingCheck::MappingCheck(PyObject* dict, PyObject* skipped) : dict_(dict), skipped_(skipped) {
  PyObject *key, *value;
  Py_ssize_t position = 0;
  while (PyDict_Next(dict, &position, &key, &value)) {
    if (counts(key)) entries_.emplace_back(key, value);
  }
  if (ordered_apart()) order_ = key_order();
}

bool MappingCheck::counts(PyObject* key) const {
  if (skipped_ == nullptr || !(PyUnicode_CheckExact(key) || PyLong_CheckExact(key))) return true;
  return !quiet(PySet_Contains(skipped_, key));
}

// An OrderedDict keeps the order of its keys beside its table, where move_to_end changes it.
bool MappingCheck::ordered_apart() const { return PyODict_Check(dict_) && entries_.size() > 1; }

std::vector<PyObject*> MappingCheck::key_order() const {
  std::vector<PyObject*> keys;
  auto iterator = py::reinterpret_steal<py::object>(PyODict_Type.tp_iter(dict_));
  while (iterator) {
    auto key = py::reinterpret_steal<py::object>(PyIter_Next(iterator.ptr()));
    if (!key) break;
    if (counts(key.ptr())) keys.push_back(key.ptr());
  }
  PyErr_Clear();
  return keys;
}

bool MappingCheck::holds(Part* part) {
  if (!version_.is_of(dict_)) {
    if (!same_entries(part)) return false;
    version_.remember(dict_);
  }
  return !ordered_apart() || key_order() == order_ || differs_at(part, nullptr);
}

bool MappingCheck::same_entries(Part* part) const {
  PyObject *key, *value;
  Py_ssize_t position = 0;
  auto entry = entries_.begin();
  while (PyDict_Next(dict_, &position, &key, &value)) {
    if (skipped_ != nullptr && !counts(key)) continue;
    if (entry == entries_.end()) return differs_at(part, key);
    if (!same_value(entry->first, key)) {
      const bool fewer = PyDict_GET_SIZE(dict_) < static_cast<Py_ssize_t>(entries_.size());
      return differs_at(part, fewer ? entry->first : key);
    }
    if (!same_value(entry->second, value)) return differs_at(part, key);
    ++entry;
  }
  return entry == entries_.end() || differs_at(part, entry->first);
}

bool EmptiesCheck::holds(Part* part) {
  for (std::size_t i = 0; i < dicts_.size(); ++i) {
    if (PyDict_GET_SIZE(dicts_[i]) != 0) return differs_at(part, py::int_(i).ptr());
  }
  return true;
}

ItemsCheck::ItemsCheck(PyObject* object, PyTypeObject* base) : object_(object), base_(base) {
  py::object iterator = iterate();
  if (!iterator) throw py::error_already_set();
  while (PyObject* item = PyIter_Next(iterator.ptr())) {
    items_.push_back(item);
    Py_DECREF(item);  // the container holds it, and soon the account, too
  }
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
}

py::object ItemsCheck::iterate() const {
  return py::reinterpret_steal<py::object>(base_->tp_iter(object_));
}

bool ItemsCheck::holds(Part* part) {
  py::object iterator = iterate();
  std::size_t index = 0;
  for (; iterator; ++index) {
    auto item = py::reinterpret_steal<py::object>(PyIter_Next(iterator.ptr()));
    if (!item) break;
    if (index == items_.size()) return differs_at(part, nullptr);
    if (!same_value(items_[index], item.ptr())) return differs_at(part, py::int_(index).ptr());
  }
  const bool failed = PyErr_Occurred() != nullptr;
  PyErr_Clear();
  return (index == items_.size() && !failed) || differs_at(part, nullptr);
}

CellCheck::CellCheck(PyObject* cell) : cell_(cell), value_(PyCell_GET(cell)) {}

bool CellCheck::holds(Part* part) {
  return same_value(value_, PyCell_GET(cell_)) || differs_at(part, nullptr);
}

FunctionCheck::Parts FunctionCheck::parts_of(PyObject* function) {
  auto* known = reinterpret_cast<PyFunctionObject*>(function);
  return {known->func_code, known->func_defaults, known->func_kwdefaults,
          known->func_name, known->func_qualname, known->func_doc};
}

bool FunctionCheck::holds(Part* part) {
  static constexpr std::array kNames{"__code__", "__defaults__", "__kwdefaults__",
                                     "__name__", "__qualname__", "__doc__"};
  const Parts now = parts_of(function_);
  for (std::size_t i = 0; i < now.size(); ++i) {
    if (!same_value(parts_[i], now[i])) return differs_at(part, py::str(kNames[i]).ptr());
  }
  return true;
}

FunctionsCheck::FunctionsCheck(const std::vector<PyObject*>& functions) {
  known_.reserve(functions.size());
  for (PyObject* each : functions) {
    auto* function = reinterpret_cast<PyFunctionObject*>(each);
    known_.push_back({function, function->func_code, function->func_defaults});
  }
}

bool FunctionsCheck::holds(Part* part) {
  for (std::size_t i = 0; i < known_.size(); ++i) {
    const Known& then = known_[i];
    if (then.function->func_code != then.code || then.function->func_defaults != then.defaults) {
      return differs_at(part, py::int_(i).ptr());
    }
  }
  return true;
}

py::object SlotCheck::read(PyObject* holder, PyObject* descriptor) {
  PyTypeObject* type = Py_TYPE(descriptor);
  PyObject* value =
      type->tp_descr_get(descriptor, holder, reinterpret_cast<PyObject*>(Py_TYPE(holder)));
  if (value == nullptr) PyErr_Clear();
  return py::reinterpret_steal<py::object>(value);
}

bool SlotCheck::holds(Part* part) {
  return same_value(value_, read(holder_, descriptor_).ptr()) || differs_at(part, nullptr);
}

bool ProbeCheck::holds(Part* part) {
  auto now =
      py::reinterpret_steal<py::object>(PyObject_CallFunctionObjArgs(function_, object_, nullptr));
  if (!now) PyErr_Clear();
  const bool same = now && (same_value(expected_, now.ptr()) ||
                            quiet(PyObject_RichCompareBool(expected_, now.ptr(), Py_EQ)));
  return same || differs_at(part, nullptr);
}

BufferCheck::BufferCheck(PyObject* object) : object_(object) {
  const Memory memory(object, PyBUF_FULL_RO);
  if (!memory.valid || !PyBuffer_IsContiguous(&memory.view, 'A')) {
    throw std::invalid_argument("no contiguous memory");
  }
  layout_ = description(memory.view);
  bytes_ = std::string(memory.bytes());
}

std::string BufferCheck::description(const Py_buffer& view) {
  std::string text = view.format != nullptr ? view.format : "B";
  if (view.readonly != 0) text += " readonly";
  for (int i = 0; i < view.ndim; ++i) {
    text += ' ' + std::to_string(view.shape[i]) + ':' + std::to_string(view.strides[i]);
  }
  return text;
}

bool BufferCheck::holds(Part* part) {
  const Memory memory(object_, PyBUF_FULL_RO);
  const bool same = memory.valid && PyBuffer_IsContiguous(&memory.view, 'A') &&
                    memory.bytes() == bytes_ && description(memory.view) == layout_;
  return same || differs_at(part, nullptr);
}

namespace {

THPVariable* variable(PyObject* tensor) { return reinterpret_cast<THPVariable*>(tensor); }

// No hooks are sometimes None, sometimes nothing, sometimes an empty dictionary.
PyObject* hooks_of(PyObject* hooks) {
  const bool none = hooks == nullptr || hooks == Py_None;
  return none || (PyDict_Check(hooks) && PyDict_GET_SIZE(hooks) == 0) ? nullptr : hooks;
}

c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

}  // namespace

struct TensorCheck::Facts {
  at::TensorImpl* impl;
  c10::StorageImpl* storage;
  c10::DispatchKeySet keys;  // layout, conjugation and negation among them
  c10::ScalarType dtype;
  c10::Device device;
  bool requires_grad;
  int64_t offset;
  c10::DimVector sizes, strides;
  PyObject *backward_hooks, *accumulate_hooks;
};

TensorCheck::Facts TensorCheck::facts(PyObject* object) {
  const at::Tensor& tensor = variable(object)->cdata;
  Facts facts{tensor.unsafeGetTensorImpl(),
              storage_of(tensor),
              tensor.key_set(),
              tensor.scalar_type(),
              tensor.device(),
              tensor.requires_grad(),
              0,
              c10::DimVector(tensor.sizes()),
              {},
              hooks_of(variable(object)->backward_hooks),
              hooks_of(variable(object)->post_accumulate_grad_hooks)};
  if (tensor.layout() == c10::kStrided) {
    facts.offset = tensor.storage_offset();
    facts.strides = c10::DimVector(tensor.strides());
  }
  return facts;
}

TensorCheck::TensorCheck(PyObject* tensor)
    : tensor_(tensor),
      facts_(std::make_shared<Facts>(facts(tensor))),
      storage_(c10::intrusive_ptr<c10::StorageImpl>()),
      gradient_function_(variable(tensor)->cdata.grad_fn()) {
  const at::Tensor& value = variable(tensor)->cdata;
  if (value.has_storage()) storage_ = value.storage().getWeakStorageImpl();
}

const char* TensorCheck::difference() const {
  const at::Tensor& tensor = variable(tensor_)->cdata;
  const Facts& was = *facts_;
  if (tensor.unsafeGetTensorImpl() != was.impl || storage_of(tensor) != was.storage) return "data";
  if (tensor.key_set() != was.keys) return "layout";
  if (tensor.scalar_type() != was.dtype) return "dtype";
  if (tensor.device() != was.device) return "device";
  if (tensor.requires_grad() != was.requires_grad) return "requires_grad";
  if (tensor.sizes() != c10::IntArrayRef(was.sizes)) return "shape";
  if (tensor.layout() == c10::kStrided && (tensor.strides() != c10::IntArrayRef(was.strides) ||
                                           tensor.storage_offset() != was.offset)) {
    return "stride";
  }
  if (hooks_of(variable(tensor_)->backward_hooks) != was.backward_hooks) return "_backward_hooks";
  if (hooks_of(variable(tensor_)->post_accumulate_grad_hooks) != was.accumulate_hooks) {
    return "_post_accumulate_grad_hooks";
  }
  if (tensor.grad_fn() != gradient_function_) return "grad_fn";
  return nullptr;
}

bool TensorCheck::holds(Part* part) {
  const char* name = difference();
  return name == nullptr || differs_at(part, py::str(name).ptr());
}

}  // namespace waterflow
