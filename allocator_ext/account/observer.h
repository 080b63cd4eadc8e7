// Which Python code runs and which C functions it calls, seen through the interpreter's profile
// hook.
//
// The hook exists in every version of Python, costs nothing while it is not set, and reports calls
// on its own thread only. What is kept per event is two pointers in a hash set; everything that
// takes time happens once for each distinct one. A profiler that was set before goes on receiving
// all events.
//
// Libraries import parts of themselves where they are first used, and hooks that packages have put
// on `sys.meta_path` run then. What imports a module happens once and has no part in what the code
// computes, so it is not kept; the body of the module is, which may also be run again.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace waterflow {

class Observer {
 public:
  // `see_through` tells of a code object whether its calls count as those of its caller; None: no.
  explicit Observer(pybind11::object see_through) : see_through_(std::move(see_through)) {}
  Observer(const Observer&) = delete;
  Observer& operator=(const Observer&) = delete;
  ~Observer();

  // Throws std::runtime_error if it observes already.
  void enter();
  // Throws std::runtime_error on another thread than the one that entered.
  void exit();

  // Every code object that was entered, in the order of first entries.
  pybind11::list codes() const;
  // (function, code of the caller, line of the call) for every distinct function of every caller.
  pybind11::list calls() const;

 private:
  struct Call {
    pybind11::object function;
    pybind11::object caller;
    int line;
  };
  struct PairHash {
    std::size_t operator()(const std::pair<const void*, const void*>& pair) const {
      return std::hash<const void*>()(pair.first) * 31 ^ std::hash<const void*>()(pair.second);
    }
  };

  static int on_event(PyObject* self, PyFrameObject* frame, int what, PyObject* argument);
  void entered(PyFrameObject* frame);
  void called(PyFrameObject* frame, PyObject* function);
  pybind11::object responsible(pybind11::object frame);
  bool has_called(const void* definition, const pybind11::object& caller) const;
  bool is_transparent(PyObject* code);

  pybind11::object see_through_;
  std::unordered_map<const void*, std::pair<pybind11::object, bool>> transparent_;
  bool active_ = false;
  unsigned long thread_ = 0;
  Py_tracefunc former_ = nullptr;
  pybind11::object former_argument_;
  std::unordered_map<const void*, pybind11::object> codes_;
  std::vector<pybind11::object> order_;
  std::unordered_set<std::pair<const void*, const void*>, PairHash> seen_;  // in `calls_`
  std::vector<Call> calls_;
};

void bind_observer(pybind11::module_& m);

}  // namespace waterflow
