#include "bind/errors.h"

#include <torch/csrc/Exceptions.h>
#include <torch/extension.h>

namespace py = pybind11;

namespace waterflow {

py::object python_exception(const std::exception_ptr& error) {
  if (!error) return py::none();
  auto make = [](const char* module, const char* name, const char* what) {
    return py::object(py::module_::import(module).attr(name)(what));
  };
  try {
    std::rethrow_exception(error);
  } catch (py::error_already_set& e) {
    return e.value();
  } catch (python_error& e) {
    e.restore();
    return py::error_already_set().value();
  } catch (const c10::OutOfMemoryError& e) {
    return make("torch", "OutOfMemoryError", e.what_without_backtrace());
  } catch (const c10::IndexError& e) {
    return make("builtins", "IndexError", e.what_without_backtrace());
  } catch (const c10::ValueError& e) {
    return make("builtins", "ValueError", e.what_without_backtrace());
  } catch (const c10::TypeError& e) {
    return make("builtins", "TypeError", e.what_without_backtrace());
  } catch (const c10::NotImplementedError& e) {
    return make("builtins", "NotImplementedError", e.what_without_backtrace());
  } catch (const c10::Error& e) {
    return make("builtins", "RuntimeError", e.what_without_backtrace());
  } catch (const std::bad_alloc& e) {
    return make("builtins", "MemoryError", e.what());
  } catch (const std::exception& e) {
    return make("builtins", "RuntimeError", e.what());
  } catch (...) {
    return make("builtins", "RuntimeError", "unknown C++ exception");
  }
}

void raise_as_python(const std::exception_ptr& error) {
  if (!error) return;
  auto exception = python_exception(error);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
  throw py::error_already_set();
}

}  // namespace waterflow
