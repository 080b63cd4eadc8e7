// What a job's schedulers do after each of its next steps, as data: worked out ahead on copies, by
// the schedulers' own code, and written step by step into the places where these would write.
//
// So the job's own objects are at every moment what they are in the plain loop after as many steps,
// whatever ends the steps, and whoever looks.
#pragma once

#include <pybind11/pybind11.h>

#include <utility>
#include <vector>

namespace waterflow {

class Schedule {
 public:
  // Of a tape: hyperparameters by their registers.
  using Registers = std::vector<std::pair<int, double>>;

  // One step's: values by the numbers of their places; and those registers that are to follow.
  struct Row {
    std::vector<std::pair<std::size_t, pybind11::object>> values;
    Registers registers;
  };

  // `places`: a dictionary, a key and the value there, or `missing`, each; all in one of `whole`
  // are given, so that nothing may come to these dictionaries or go.
  Schedule(const pybind11::list& places, const pybind11::object& missing,
           const pybind11::list& whole, std::vector<Row> rows);

  // Whether nobody else has written to the places since.
  bool holds() const;
  // Does what is left to do after so many steps; false where that is not known, or does not hold.
  bool advance_to(std::size_t steps);
  std::size_t done() const { return done_; }
  // That the last row has set.
  const Registers& registers() const;

 private:
  struct Place {
    pybind11::dict dict;
    pybind11::object key, value;  // no value: nothing is there
  };
  struct Whole {
    pybind11::dict dict;
    Py_ssize_t size;
  };
  void write(const Row& row);

  std::vector<Place> places_;
  std::vector<Whole> whole_;
  std::vector<Row> rows_;
  std::size_t done_ = 0;
};

void bind_schedule(pybind11::module_& m);

}  // namespace waterflow
