// The kinds of checks that an account of Python state is made of (guards.h).
//
// A check remembers one place: the attributes of an object, a list, a cell, a tensor's layout. It
// calls no code but that of Python's built-in types, so looking cannot change what is looked at.
// References to what is compared with are held by the Guards that a check belongs to; a check
// itself holds borrowed ones, and references to keys (strings), which can be part of no cycle.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <array>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace waterflow {

// Whether two values are one object, or plain values (numbers by their bits, text, tuples of such,
// bound methods) that nothing can tell apart. Null stands for a value that is not there.
bool same_value(PyObject* expected, PyObject* actual);

// An object's own attributes, without making a dictionary where there is none; null if so.
pybind11::object instance_dict(PyObject* object);

// The tag of a class as it is now; gives it one if it has none. Zero: it cannot have one.
unsigned version_of(PyTypeObject* type);

// A class made at run time; null: another, whose names are fixed.
PyHeapTypeObject* heap_type(PyTypeObject* type);

// A class's own attributes.
pybind11::object class_dict(PyTypeObject* type);

// The part of a place that differs: an attribute's name, a key, an index; None if no single one.
using Part = pybind11::object;

class Check {
 public:
  virtual ~Check() = default;
  // True if the place is as it was; else `part`, if asked for, says where it is not.
  virtual bool holds(Part* part) = 0;
};

// Which keys of a namespace count. `names` null: all.
struct Watched {
  PyObject* names;
  PyObject* skipped;
  bool dunders;  // names like __call__ count in any case
  bool operator()(PyObject* key) const;
};

// How a dictionary was when it was last looked through: CPython 3.11 gives it a version that every
// change of an entry makes anew, and that is never used twice. Later releases have none to read.
class Version {
 public:
  bool is_of(PyObject* dict) const { return dict == dict_ && tag_ != 0 && tag_ == tag_of(dict); }
  void remember(PyObject* dict) {
    dict_ = dict;
    tag_ = tag_of(dict);
  }

 private:
  static std::uint64_t tag_of(PyObject* dict) {
#if PY_VERSION_HEX < 0x030C0000
    return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
#else
    return 0;
#endif
  }

  PyObject* dict_ = nullptr;
  std::uint64_t tag_ = 0;
};

// A namespace remembered by the keys that count; an unchanged version, then the order of keys, are
// the fast paths.
class Namespace {
 public:
  Namespace(PyObject* dict, Watched watched);
  bool holds(PyObject* dict, Part* part);
  const std::vector<std::pair<pybind11::object, PyObject*>>& entries() const { return entries_; }

 private:
  bool in_order(PyObject* dict) const;
  bool by_key(PyObject* dict, Part* part) const;
  PyObject* expected(PyObject* key) const;
  void remember_order(PyObject* dict);

  Watched watched_;
  std::vector<std::pair<pybind11::object, PyObject*>> entries_;  // those that count
  std::vector<std::pair<pybind11::object, PyObject*>> order_;    // all; null: does not count
  Version version_;
};

class AttributesCheck final : public Check {
 public:
  AttributesCheck(PyObject* holder, Watched watched);
  bool holds(Part* part) override;
  const Namespace& space() const { return space_; }

 private:
  PyObject* holder_;
  PyTypeObject* type_;
  Namespace space_;
};

// A class: its bases, metaclass and own attributes. The interpreter's version tag, which changes
// with every attribute of the class and its bases and is never used twice, is the fast path.
class TypeCheck final : public Check {
 public:
  TypeCheck(PyTypeObject* type, Watched watched);
  bool holds(Part* part) override;
  const Namespace& space() const { return space_; }

 private:
  PyTypeObject* type_;
  PyTypeObject* metaclass_;
  PyObject* order_;                   // of resolution: the bases
  PyObject *name_, *qualified_name_;  // null: fixed
  unsigned tag_;
  Namespace space_;
};

// Some keys of a dictionary (a module's globals), there or not.
class KeysCheck final : public Check {
 public:
  KeysCheck(PyObject* dict, const std::vector<PyObject*>& keys);
  bool holds(Part* part) override;

 private:
  PyObject* dict_;
  std::vector<std::pair<PyObject*, PyObject*>> entries_;
};

// All of a dictionary, in order, but for the skipped keys.
class MappingCheck final : public Check {
 public:
  MappingCheck(PyObject* dict, PyObject* skipped);
  bool holds(Part* part) override;
  const std::vector<std::pair<PyObject*, PyObject*>>& entries() const { return entries_; }

 private:
  bool counts(PyObject* key) const;
  bool ordered_apart() const;
  std::vector<PyObject*> key_order() const;
  bool same_entries(Part* part) const;

  PyObject* dict_;
  PyObject* skipped_;
  std::vector<std::pair<PyObject*, PyObject*>> entries_;
  std::vector<PyObject*> order_;
  Version version_;
};

// Dictionaries that nobody has put anything into, as nearly all hooks of modules.
class EmptiesCheck final : public Check {
 public:
  explicit EmptiesCheck(std::vector<PyObject*> dicts) : dicts_(std::move(dicts)) {}
  bool holds(Part* part) override;

 private:
  std::vector<PyObject*> dicts_;
};

// What the iterator of a built-in base (list, set, deque) gives, whatever a subclass overrides.
class ItemsCheck final : public Check {
 public:
  ItemsCheck(PyObject* object, PyTypeObject* base);
  bool holds(Part* part) override;
  const std::vector<PyObject*>& items() const { return items_; }

 private:
  pybind11::object iterate() const;
  PyObject* object_;
  PyTypeObject* base_;
  std::vector<PyObject*> items_;
};

class CellCheck final : public Check {
 public:
  explicit CellCheck(PyObject* cell);
  bool holds(Part* part) override;

 private:
  PyObject* cell_;
  PyObject* value_;
};

class FunctionCheck final : public Check {
 public:
  // Of a function, what can be set: code, defaults, names, text; null where there is none.
  using Parts = std::array<PyObject*, 6>;

  explicit FunctionCheck(PyObject* function) : function_(function), parts_(parts_of(function)) {}
  bool holds(Part* part) override;
  static Parts parts_of(PyObject* function);

 private:
  PyObject* function_;
  Parts parts_;
};

// The code and defaults of many functions, which nobody is expected to change.
class FunctionsCheck final : public Check {
 public:
  explicit FunctionsCheck(const std::vector<PyObject*>& functions);
  bool holds(Part* part) override;

 private:
  struct Known {
    PyFunctionObject* function;
    PyObject* code;
    PyObject* defaults;
  };
  std::vector<Known> known_;
};

// A slot of an object, read through its class's member descriptor.
class SlotCheck final : public Check {
 public:
  SlotCheck(PyObject* holder, PyObject* descriptor, PyObject* value)
      : holder_(holder), descriptor_(descriptor), value_(value) {}
  bool holds(Part* part) override;
  // Empty if nothing is assigned.
  static pybind11::object read(PyObject* holder, PyObject* descriptor);

 private:
  PyObject* holder_;
  PyObject* descriptor_;
  PyObject* value_;
};

// What a tensor is, not what is in it. Its storage is referred to weakly: the memory may go, but
// its address is not given to another storage meanwhile.
class TensorCheck final : public Check {
 public:
  explicit TensorCheck(PyObject* tensor);
  bool holds(Part* part) override;

 private:
  struct Facts;
  static Facts facts(PyObject* tensor);
  const char* difference() const;

  PyObject* tensor_;
  std::shared_ptr<Facts> facts_;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
  std::decay_t<decltype(std::declval<at::Tensor>().grad_fn())> gradient_function_;
};

// The memory of an object with the buffer protocol, by its bytes.
class BufferCheck final : public Check {
 public:
  explicit BufferCheck(PyObject* object);
  bool holds(Part* part) override;

 private:
  static std::string description(const Py_buffer& view);
  PyObject* object_;
  std::string layout_;
  std::string bytes_;
};

// What a function says about an object, for whatever has no check of its own.
class ProbeCheck final : public Check {
 public:
  ProbeCheck(PyObject* function, PyObject* object, PyObject* expected)
      : function_(function), object_(object), expected_(expected) {}
  bool holds(Part* part) override;

 private:
  PyObject* function_;
  PyObject* object_;
  PyObject* expected_;
};

}  // namespace waterflow
