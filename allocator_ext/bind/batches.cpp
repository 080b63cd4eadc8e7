#include "bind/batches.h"

#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <c10/util/hash.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

#include "account/checks.h"
#include "bind/bits.h"
#include "runtime/skew.h"

namespace py = pybind11;

namespace waterflow {
namespace {

// What tells a plain tensor of a batch from others that a step graph would not serve.
struct Layout {
  explicit Layout(const at::Tensor& tensor)
      : dtype(tensor.scalar_type()),
        sizes(tensor.sizes()),
        strides(tensor.strides()),
        requires_grad(tensor.requires_grad()),
        is_skewed(skew_of(tensor) != 0) {}

  bool is_of(const at::Tensor& tensor) const {
    return tensor.layout() == at::kStrided && !tensor.is_conj() && !tensor.is_neg() &&
           tensor.scalar_type() == dtype && tensor.sizes() == at::IntArrayRef(sizes) &&
           tensor.strides() == at::IntArrayRef(strides) &&
           tensor.requires_grad() == requires_grad && (skew_of(tensor) != 0) == is_skewed &&
           !tensor.is_inference() && !(tensor.is_leaf() && tensor.grad().defined());
  }

  at::ScalarType dtype;
  at::DimVector sizes, strides;
  bool requires_grad, is_skewed;
};

// Whether a step could read an attribute of the user's of a tensor.
bool has_attributes(py::handle tensor) {
  const py::object dict = instance_dict(tensor.ptr());
  return dict && PyDict_GET_SIZE(dict.ptr()) != 0;
}

bool is_plain(py::handle object) {
  return reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())) == THPVariableClass &&
         !has_attributes(object);
}

bool is_list_or_tuple(py::handle object) {
  return PyList_CheckExact(object.ptr()) || PyTuple_CheckExact(object.ptr());
}

// Whether an object stands twice in a list or a tuple, which code may see (`image is target`).
bool has_repeats(py::handle sequence) {
  PyObject** items = PySequence_Fast_ITEMS(sequence.ptr());
  std::vector<PyObject*> parts(items, items + PySequence_Fast_GET_SIZE(sequence.ptr()));
  std::sort(parts.begin(), parts.end());
  return std::adjacent_find(parts.begin(), parts.end()) != parts.end();
}

// A number that batches of the same layouts have in common; None where a batch is no plain list or
// tuple of plain tensors.
std::optional<std::size_t> layouts_hash(py::handle batch) {
  if (!is_list_or_tuple(batch)) return std::nullopt;
  std::size_t hash = PyList_CheckExact(batch.ptr()) ? 1 : 2;
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(batch.ptr());
  for (Py_ssize_t at = 0; at < count; ++at) {
    PyObject* part = PySequence_Fast_GET_ITEM(batch.ptr(), at);
    if (!is_plain(part)) return std::nullopt;
    const at::Tensor& tensor = THPVariable_Unpack(part);
    if (tensor.layout() != at::kStrided) return std::nullopt;
    hash = c10::hash_combine(hash, static_cast<std::size_t>(tensor.scalar_type()));
    hash = c10::hash_combine(hash, static_cast<std::size_t>(skew_of(tensor) != 0));
    for (const std::int64_t size : tensor.sizes()) {
      hash = c10::hash_combine(hash, static_cast<std::size_t>(size));
    }
  }
  return hash;
}

// The layouts of a plain list or tuple of plain tensors, to see quickly whether others are the
// same: one call where Python would ask each tensor for each of them.
class Layouts {
 public:
  explicit Layouts(py::object batch) : type_(Py_TYPE(batch.ptr())) {
    if (!is_list_or_tuple(batch)) {
      throw py::type_error("layouts are those of a list or a tuple");
    }
    if (has_repeats(batch)) throw py::type_error("layouts are those of different tensors");
    for (py::handle part : batch) {
      if (!is_plain(part)) throw py::type_error("layouts are those of plain tensors");
      layouts_.emplace_back(THPVariable_Unpack(part.ptr()));
    }
  }

  bool are_of(py::handle batch) const {
    if (Py_TYPE(batch.ptr()) != type_) return false;
    if (PySequence_Fast_GET_SIZE(batch.ptr()) != static_cast<Py_ssize_t>(layouts_.size())) {
      return false;
    }
    if (has_repeats(batch)) return false;
    for (std::size_t i = 0; i < layouts_.size(); ++i) {
      PyObject* part = PySequence_Fast_GET_ITEM(batch.ptr(), static_cast<Py_ssize_t>(i));
      if (!is_plain(part) || !layouts_[i].is_of(THPVariable_Unpack(part))) return false;
    }
    return true;
  }

 private:
  PyTypeObject* type_;
  std::vector<Layout> layouts_;
};

// The parts of a plain list, tuple or dictionary, or the batch itself as its only part. They are
// held: another thread may change the batch while the interpreter lock is given up.
std::vector<py::object> parts_of(py::handle batch) {
  std::vector<py::object> parts;
  if (PyDict_CheckExact(batch.ptr())) {
    for (auto item : py::reinterpret_borrow<py::dict>(batch)) {
      parts.push_back(py::reinterpret_borrow<py::object>(item.second));
    }
  } else if (is_list_or_tuple(batch)) {
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(batch.ptr());
    for (Py_ssize_t at = 0; at < size; ++at) {
      parts.push_back(
          py::reinterpret_borrow<py::object>(PySequence_Fast_GET_ITEM(batch.ptr(), at)));
    }
  } else {
    parts.push_back(py::reinterpret_borrow<py::object>(batch));
  }
  return parts;
}

// The keys of a plain dictionary, in their order; none of any other batch.
std::vector<py::object> keys_of(py::handle batch) {
  std::vector<py::object> keys;
  if (PyDict_CheckExact(batch.ptr())) {
    for (auto item : py::reinterpret_borrow<py::dict>(batch)) {
      keys.push_back(py::reinterpret_borrow<py::object>(item.first));
    }
  }
  return keys;
}

// Whether nobody can write to a value.
bool is_constant(py::handle value) {
  return value.is_none() || PyLong_CheckExact(value.ptr()) || PyFloat_CheckExact(value.ptr()) ||
         PyBool_Check(value.ptr()) || PyUnicode_CheckExact(value.ptr());
}

std::uint64_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<std::uint64_t>(tensor._version());
}

// How often torch has told of changes in place of a batch's tensors. Batches of other things than
// plain tensors and constants are not looked at.
class Versions {
 public:
  explicit Versions(py::handle batch) {
    for (const py::object& part : parts_of(batch)) {
      if (is_plain(part) && THPVariable_Unpack(part.ptr()).layout() == at::kStrided) {
        const at::Tensor& tensor = THPVariable_Unpack(part.ptr());
        seen_.emplace_back(tensor, version_of(tensor));
      } else if (!is_constant(part)) {
        seen_.clear();
        return;
      }
    }
  }

  // Those that were changed since.
  std::vector<at::Tensor> changed() const {
    std::vector<at::Tensor> found;
    for (const auto& [tensor, version] : seen_) {
      if (version_of(tensor) != version) found.push_back(tensor);
    }
    return found;
  }

 private:
  std::vector<std::pair<at::Tensor, std::uint64_t>> seen_;
};

// A copy of a tensor in one piece, aligned as it is.
at::Tensor aligned_clone(const at::Tensor& tensor) {
  const std::int64_t skew = skew_of(tensor);
  if (skew == 0 || skew % tensor.element_size() != 0) return tensor.clone();
  const auto bytes = static_cast<std::int64_t>(tensor.nbytes());
  const at::Tensor room = at::empty({bytes + kAlignment}, tensor.options().dtype(at::kByte));
  const std::int64_t at = begin_of(room, skew) - static_cast<char*>(room.mutable_data_ptr());
  at::Tensor twin = room.narrow(0, at, bytes).view(tensor.scalar_type()).view(tensor.sizes());
  std::memcpy(twin.mutable_data_ptr(), tensor.const_data_ptr(), tensor.nbytes());
  return twin;
}

// Spans of addresses, in order and apart.
class Addresses {
 public:
  Addresses(std::vector<std::uint64_t> starts, std::vector<std::uint64_t> stops)
      : starts_(std::move(starts)), stops_(std::move(stops)) {}

  // Whether some of a tensor's memory is among them, whichever part of that it is a view of.
  bool meet(const at::Tensor& tensor) const {
    const auto start = reinterpret_cast<std::uint64_t>(tensor.storage().data());
    const std::uint64_t stop = start + tensor.storage().nbytes();
    const auto behind = std::lower_bound(starts_.begin(), starts_.end(), stop);
    if (behind == starts_.begin()) return false;
    const auto before = static_cast<std::size_t>(behind - starts_.begin()) - 1;
    return start < std::min(stop, stops_[before]);
  }

  // A batch with copies of those of its tensors whose memory meets these addresses; None where it
  // is no plain container of constants and plain tensors, in one piece each, that share no memory.
  std::optional<py::object> copied_from(py::handle batch) const {
    const bool is_dict = PyDict_CheckExact(batch.ptr()), is_tuple = PyTuple_CheckExact(batch.ptr());
    if (!is_dict && !is_list_or_tuple(batch)) return std::nullopt;
    const std::vector<py::object> keys = keys_of(batch);
    std::vector<py::object> parts = parts_of(batch);
    std::size_t bytes = 0;
    std::unordered_set<const void*> storages;
    std::vector<std::size_t> places;  // of those to be copied
    for (std::size_t at = 0; at < parts.size(); ++at) {
      if (is_constant(parts[at])) continue;
      if (!is_plain(parts[at])) return std::nullopt;
      const at::Tensor& tensor = THPVariable_Unpack(parts[at].ptr());
      if (!has_plain_rows(tensor) || tensor.numel() == 0) return std::nullopt;
      if (!storages.insert(tensor.storage().unsafeGetStorageImpl()).second) return std::nullopt;
      if (!meet(tensor)) continue;
      bytes += tensor.nbytes();
      places.push_back(at);
    }
    std::vector<at::Tensor> copies;
    {
      std::optional<py::gil_scoped_release> unlocked;
      if (bytes > kFewBytes) unlocked.emplace();
      for (const std::size_t at : places) {
        copies.push_back(aligned_clone(THPVariable_Unpack(parts[at].ptr())));
      }
    }
    for (std::size_t i = 0; i < places.size(); ++i) parts[places[i]] = py::cast(copies[i]);
    if (is_dict) {
      py::dict made;
      for (std::size_t at = 0; at < parts.size(); ++at) made[keys[at]] = parts[at];
      return made;
    }
    py::list made;
    for (const py::object& part : parts) made.append(part);
    if (is_tuple) return py::tuple(made);
    return made;
  }

 private:
  std::vector<std::uint64_t> starts_, stops_;
};

// Whether two batches are plain containers of the same kind whose parts are the same objects, or
// tensors whose memory is known to hold the same. What is not known to is no difference yet.
bool have_same_bits(py::handle left, py::handle right) {
  if (Py_TYPE(left.ptr()) != Py_TYPE(right.ptr())) return false;
  if (!PyDict_CheckExact(left.ptr()) && !is_list_or_tuple(left)) return false;
  const auto are_all = [](const auto& one, const auto& other, const auto& same) {
    return std::equal(one.begin(), one.end(), other.begin(), other.end(), same);
  };
  const auto is_same = [](const py::object& one, const py::object& other) { return one.is(other); };
  if (!are_all(keys_of(left), keys_of(right), is_same)) return false;
  return are_all(parts_of(left), parts_of(right), [&](const auto& one, const auto& other) {
    if (is_same(one, other)) return true;
    return is_plain(one) && is_plain(other) &&
           has_same_bits(THPVariable_Unpack(one.ptr()), THPVariable_Unpack(other.ptr()));
  });
}

}  // namespace

void bind_batches(py::module_& m) {
  py::class_<Layouts>(m, "Layouts")
      .def(py::init<py::object>(), py::arg("batch"))
      .def("are_of", &Layouts::are_of, py::arg("batch"));
  m.def(
      "is_skewed", [](const at::Tensor& tensor) { return skew_of(tensor) != 0; },
      py::arg("tensor"));
  m.def("aligned_clone", &aligned_clone, py::arg("tensor"));
  m.def("layouts_hash", &layouts_hash, py::arg("batch"));
  py::class_<Versions>(m, "Versions")
      .def(py::init<py::handle>(), py::arg("batch"))
      .def("changed", &Versions::changed);
  py::class_<Addresses>(m, "Addresses")
      .def(py::init<std::vector<std::uint64_t>, std::vector<std::uint64_t>>(), py::arg("starts"),
           py::arg("stops"))
      .def("meet", &Addresses::meet, py::arg("tensor"))
      .def("copied_from", &Addresses::copied_from, py::arg("batch"));
  m.def("have_same_bits", &have_same_bits, py::arg("left"), py::arg("right"));
}

}  // namespace waterflow
