// A tape is a step graph compiled for execution: operators resolved once, arguments converted once,
// values in slots, the slots to release listed per instruction. It runs below autograd and without
// the interpreter lock, so that several lanes make progress at once.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "runtime/elementwise.h"
#include "runtime/lane.h"
#include "runtime/spill.h"
#include "runtime/views.h"

namespace waterflow {

// Where an operator's argument comes from.
struct Argument {
  enum class Kind {
    kConstant,   // `value`, converted once
    kSlot,       // the tensor in slot `index`
    kSlots,      // a list of the tensors in `indices` (-1: none)
    kScalar,     // scalar register `index`, as the schema's number type
    kScalars,    // a list of registers `indices` (-1: the constant at the same place in `scalars`)
    kWrapped,    // scalar register `index`, as the 0-dim tensor that PyTorch makes of a number
    kSingle,     // the same in float32; of the constant `value` where `index` is -1
    kGenerator,  // the job's random generator of the host or, with `index` 1, of the device
  };
  Kind kind = Kind::kConstant;
  c10::IValue value;
  int index = -1;
  std::vector<int> indices;
  std::vector<double> scalars;
  bool optional_elements = false;  // kSlots of Tensor?[]
  bool floats = false;             // kScalars of float[] rather than Scalar[]
};

// Where an operator's result goes: a slot, nowhere (-1), or a slot per element of a list.
struct Result {
  int slot = -1;
  std::vector<int> elements;
  bool is_list = false;
};

// What is computed with registers.
enum class Arithmetic { kNegate, kAdd, kSubtract, kMultiply, kDivide, kPower };

struct Instruction {
  enum class Kind { kOperator, kLoad, kReadScalar, kArithmetic, kReadLoss, kMove };
  Kind kind = Kind::kOperator;
  std::string name;
  std::optional<c10::OperatorHandle> op;
  std::vector<Argument> arguments;
  std::vector<Result> results;
  std::vector<int> release;
  int input = -1, slot = -1;  // kLoad: batch tensor -> slot; kReadScalar, kReadLoss: slot
  int target = -1, left = -1, right = -1;      // kArithmetic and kReadScalar: registers
  Arithmetic operation = Arithmetic::kNegate;  // kArithmetic
  MoveInstruction move;                        // kMove
  bool gradients = true;                       // runs with gradient mode on
  // Ways round the dispatcher, of operators that have one; views are of the tensor in `slot`.
  std::unique_ptr<ViewMemo> views;
  std::unique_ptr<Shortcut> shortcut;
};

class Tape {
 public:
  Tape(int slots, int registers);

  void add(Instruction instruction);
  int size() const { return static_cast<int>(instructions_.size()); }
  // The instructions before which gradient mode is switched, which is on at first: as in the eager
  // step, since kernels ask.
  void set_gradient_switches(const std::vector<int>& places);

  void set_slot(int slot, at::Tensor value) { slots_.at(slot) = std::move(value); }
  at::Tensor slot(int slot) const { return slots_.at(slot); }
  void set_register(int index, double value) { registers_.at(index) = value; }
  void set_batch(std::vector<at::Tensor> batch) { batch_ = std::move(batch); }
  // The job's own random streams: the host's, and the device's for a job on one.
  void set_generators(at::Generator host, std::optional<at::Generator> device) {
    host_generator_ = std::move(host);
    device_generator_ = std::move(device);
  }
  // The loss of the step run last: a number; of a step on a device, a host tensor that holds it
  // once the device has come so far.
  const std::variant<double, at::Tensor>& loss() const { return loss_; }
  // Numbers that the step has told beside its loss, where both lie in one tensor of doubles; of a
  // step on a device they are behind the loss in that host tensor.
  const std::vector<double>& metrics() const { return metrics_; }
  // Number of instructions at the start that read the batch.
  int loads() const { return loads_; }

  // Runs instructions [start, stop) on the calling thread. Throws what the kernels throw.
  void run(int start, int stop);
  // Drops the values of the slots named.
  void clear(const std::vector<int>& slots);
  // The slots that only hold values while a step runs; and their end when a step has failed.
  void set_transient(std::vector<int> slots) { transient_ = std::move(slots); }
  void abandon();
  // The storages that are away for a while, and the instructions at which they move.
  AwayStorages& away() { return away_; }
  const std::vector<int>& moves() const { return moves_; }
  const MoveInstruction& move_at(int index) const { return instructions_.at(index).move; }

 private:
  void execute(Instruction& instruction);
  void call(Instruction& instruction);
  void dispatch(Instruction& instruction);
  void make_views(const Instruction& instruction);
  void load(const Instruction& instruction);
  void read_loss(const at::Tensor& loss);
  at::Tensor numbers_for(const at::Tensor& loss);
  at::Generator& generator(bool device);
  void compute(const Instruction& instruction);
  void move(const Instruction& instruction);
  void push(const Argument& argument);
  void store(const Instruction& instruction);

  std::vector<Instruction> instructions_;
  AwayStorages away_;
  std::vector<int> moves_;
  // That its elementwise instructions share.
  const std::shared_ptr<ElementwisePlans> plans_ = std::make_shared<ElementwisePlans>();
  std::vector<at::Tensor> slots_;
  std::vector<double> registers_;
  std::vector<at::Tensor> batch_;
  std::optional<at::Generator> host_generator_;
  std::optional<at::Generator> device_generator_;
  std::vector<c10::IValue> stack_;
  std::vector<int> transient_;
  int loads_ = 0;
  std::variant<double, at::Tensor> loss_;
  std::vector<double> metrics_;
  std::vector<at::Tensor> numbers_;  // on the host, of one dtype, for what steps on a device tell
};

}  // namespace waterflow
