#include "runtime/random.h"

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace waterflow {
namespace {

// The last key before the kernels of a backend, on every thread and below all that transforms
// operators or shows them to Python (autograd, vmap, modes): those see what they see elsewhere, and
// nothing can switch it off. torch uses it for factories only, which call operators covered here.
constexpr auto kKey = c10::DispatchKey::BackendSelect;

thread_local const RandomScope* innermost = nullptr;
thread_local bool lent = false;  // this thread has the device's default generator on loan

// Where the operator works: its device argument, else its first tensor's. Factories that are told
// nothing work on the host (a default device is passed to them by Python).
c10::Device device_of(const torch::jit::Stack& stack, std::size_t arguments) {
  std::optional<c10::Device> device;
  for (std::size_t place = stack.size() - arguments; place < stack.size(); ++place) {
    const c10::IValue& value = stack[place];
    if (value.isDevice()) return value.toDevice();
    if (device) continue;
    if (value.isTensor() && value.toTensor().defined()) device = value.toTensor().device();
    if (value.isTensorList() && !value.toTensorList().empty()) {
      device = static_cast<at::Tensor>(value.toTensorList()[0]).device();
    }
  }
  return device.value_or(c10::kCPU);
}

bool is_generator(const c10::Argument& argument) {
  const auto* optional = argument.type()->castRaw<c10::OptionalType>();
  const auto& type = optional == nullptr ? argument.type() : optional->getElementType();
  return type->kind() == c10::TypeKind::GeneratorType;
}

std::optional<std::size_t> generator_place(const c10::FunctionSchema& schema) {
  const auto& arguments = schema.arguments();
  for (std::size_t place = 0; place < arguments.size(); ++place) {
    if (is_generator(arguments[place])) return place;
  }
  return std::nullopt;
}

bool is_default(const c10::IValue& generator, c10::Device device) {
  return generator.isNone() ||
         generator.toGenerator() == at::globalContext().defaultGenerator(device);
}

// The kernel of operators that take a generator.
void draw_from_argument(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                        torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::size_t count = schema.arguments().size();
  if (innermost != nullptr) {
    const c10::Device device = device_of(*stack, count);
    const at::Generator* stream = innermost->stream(device);
    c10::IValue& given = (*stack)[stack->size() - count + *generator_place(schema)];
    if (stream != nullptr && !(lent && !device.is_cpu()) && is_default(given, device)) {
      given = *stream;
    }
  }
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
}

// Where a device's generator stands.
struct Position {
  std::uint64_t seed;
  std::uint64_t offset;
};

Position position_of(at::Generator generator) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  return {generator.current_seed(), generator.get_offset()};
}

void move_to(at::Generator generator, Position position) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_current_seed(position.seed);  // starts the stream anew, so the place comes second
  generator.set_offset(position.offset);
}

// While alive, the default generator of a device continues `generator`'s stream; afterwards it is
// what it was and `generator` has moved on. One at a time in the process.
class Loan {
 public:
  explicit Loan(const at::Generator& generator)
      : lock_(mutex()),
        generator_(generator),
        standard_(at::globalContext().defaultGenerator(generator.device())),
        saved_(position_of(standard_)) {
    move_to(standard_, position_of(generator_));
    lent = true;
  }
  ~Loan() {
    lent = false;
    move_to(generator_, position_of(standard_));
    move_to(standard_, saved_);
  }
  Loan(const Loan&) = delete;
  Loan& operator=(const Loan&) = delete;

 private:
  static std::mutex& mutex() {
    static std::mutex mutex;
    return mutex;
  }

  std::unique_lock<std::mutex> lock_;
  const at::Generator& generator_;
  at::Generator standard_;
  Position saved_;
};

// The kernel of random operators that take no generator. What they call on the host does.
void draw_from_default(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                       torch::jit::Stack* stack) {
  const at::Generator* stream = nullptr;
  if (innermost != nullptr && !lent) {
    const c10::Device device = device_of(*stack, op.schema().arguments().size());
    if (!device.is_cpu()) stream = innermost->stream(device);
  }
  std::optional<Loan> loan;
  if (stream != nullptr) loan.emplace(*stream);
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
}

bool takes_generator(const c10::OperatorHandle& op) {
  return generator_place(op.schema()).has_value();
}

bool only_draws_from_default(const c10::OperatorHandle& op) {
  return op.hasTag(at::Tag::nondeterministic_seeded) && !takes_generator(op);
}

// The kernels stay for as long as the process does.
using Registrations = std::vector<c10::RegistrationHandleRAII>;

template <c10::KernelFunction::BoxedKernelFunction_withDispatchKeys* kernel>
void cover(Registrations& registrations, bool (*covers)(const c10::OperatorHandle&)) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);  // none where only kernels are registered so far
    if (!op.has_value() || op->hasKernelForDispatchKey(kKey) || !covers(*op)) continue;
    registrations.push_back(
        dispatcher.registerImpl(name, kKey, c10::KernelFunction::makeFromBoxedFunction<kernel>(),
                                std::nullopt, nullptr, "a random operator of a waterflow job"));
  }
}

Registrations& registrations() {
  static auto* registrations = new Registrations();
  return *registrations;
}

}  // namespace

void prepare_random_scopes() { cover<&draw_from_argument>(registrations(), &takes_generator); }

RandomScope::RandomScope(const at::Generator& host, const std::optional<at::Generator>& device)
    : host_(host), device_(device), former_(innermost) {
  static std::once_flag on_devices;
  if (device.has_value()) {
    std::call_once(on_devices,
                   [] { cover<&draw_from_default>(registrations(), &only_draws_from_default); });
  }
  innermost = this;
}

RandomScope::~RandomScope() { innermost = former_; }

const at::Generator* RandomScope::stream(c10::Device device) const {
  if (device.is_cpu()) return &host_;
  if (!device_.has_value() || device_->device().type() != device.type()) return nullptr;
  const bool here = !device.has_index() || device.index() == device_->device().index();
  return here ? &*device_ : nullptr;
}

}  // namespace waterflow
