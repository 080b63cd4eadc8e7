#include "bind/layouts.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/python_variable.h>

#include <vector>

namespace py = pybind11;

namespace waterflow {
namespace {

// What tells a plain tensor of a batch from others that a step graph would not serve.
struct Layout {
  explicit Layout(const at::Tensor& tensor)
      : dtype(tensor.scalar_type()),
        sizes(tensor.sizes()),
        strides(tensor.strides()),
        requires_grad(tensor.requires_grad()) {}

  bool is_of(const at::Tensor& tensor) const {
    return tensor.layout() == at::kStrided && !tensor.is_conj() && !tensor.is_neg() &&
           tensor.scalar_type() == dtype && tensor.sizes() == at::IntArrayRef(sizes) &&
           tensor.strides() == at::IntArrayRef(strides) && tensor.requires_grad() == requires_grad;
  }

  at::ScalarType dtype;
  at::DimVector sizes, strides;
  bool requires_grad;
};

bool is_plain(py::handle object) {
  return reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())) == THPVariableClass;
}

// The layouts of a plain list or tuple of plain tensors, to see quickly whether others are the
// same: one call where Python would ask each tensor for each of them.
class Layouts {
 public:
  explicit Layouts(py::object batch) : type_(Py_TYPE(batch.ptr())) {
    if (!(PyList_CheckExact(batch.ptr()) || PyTuple_CheckExact(batch.ptr()))) {
      throw py::type_error("layouts are those of a list or a tuple");
    }
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

}  // namespace

void bind_layouts(py::module_& m) {
  py::class_<Layouts>(m, "Layouts")
      .def(py::init<py::object>(), py::arg("batch"))
      .def("are_of", &Layouts::are_of, py::arg("batch"));
}

}  // namespace waterflow
