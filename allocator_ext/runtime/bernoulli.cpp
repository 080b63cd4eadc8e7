#include "runtime/bernoulli.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <mutex>

#include "runtime/outside.h"
#include "runtime/views.h"

namespace waterflow {
namespace {

// Of an element's two words so many bits are a number from 0 to 1 without 1.
constexpr int kBits = 53;
// So many elements are made together.
constexpr int64_t kTogether = at::MERSENNE_STATE_N;

using Engine = at::mt19937_data_pod;

std::uint32_t twisted(std::uint32_t one, std::uint32_t next) {
  const std::uint32_t mixed = (one & at::UMASK) | (next & at::LMASK);
  return (mixed >> 1) ^ ((0 - (next & 1)) & at::MATRIX_A);
}

// The engine's words for as many calls as it has, all used up before.
void renew(Engine& engine) {
  constexpr int count = at::MERSENNE_STATE_N, apart = at::MERSENNE_STATE_M;
  std::uint32_t* words = engine.state_.data();
  for (int i = 0; i < count - apart; ++i) {
    words[i] = words[i + apart] ^ twisted(words[i], words[i + 1]);
  }
  for (int i = count - apart; i < count - 1; ++i) {
    words[i] = words[i + apart - count] ^ twisted(words[i], words[i + 1]);
  }
  words[count - 1] = words[apart - 1] ^ twisted(words[count - 1], words[0]);
  engine.next_ = 0;
  engine.left_ = count + 1;  // one more than there are
}

// The next words of an engine.
void draw(Engine& engine, std::uint32_t* into, int64_t count) {
  while (count > 0) {
    if (engine.left_ == 1) renew(engine);
    const int64_t some = std::min<int64_t>(count, engine.left_ - 1);
    const std::uint32_t* words = engine.state_.data() + engine.next_;
    for (int64_t i = 0; i < some; ++i) {
      std::uint32_t word = words[i];
      word ^= word >> 11;
      word ^= (word << 7) & 0x9d2c5680;
      word ^= (word << 15) & 0xefc60000;
      into[i] = word ^ (word >> 18);
    }
    engine.next_ += static_cast<std::uint32_t>(some);
    engine.left_ -= static_cast<int>(some);
    into += some;
    count -= some;
  }
}

void fill(float* values, int64_t count, double probability, at::CPUGeneratorImpl& generator) {
  // A number k / 2^53 is smaller than the probability where k is smaller than this.
  const auto below = static_cast<std::uint64_t>(std::ceil(std::ldexp(probability, kBits)));
  constexpr std::uint64_t mask = (std::uint64_t{1} << kBits) - 1;
  const std::lock_guard<std::mutex> lock(generator.mutex_);
  at::mt19937 engine = generator.engine();
  Engine state = engine.data();
  std::array<std::uint32_t, 2 * kTogether> words;
  for (int64_t start = 0; start < count; start += kTogether) {
    const int64_t some = std::min(kTogether, count - start);
    draw(state, words.data(), 2 * some);
    for (int64_t i = 0; i < some; ++i) {
      const std::uint64_t both = (std::uint64_t{words[2 * i]} << 32) | words[2 * i + 1];
      values[start + i] = (both & mask) < below ? 1.0F : 0.0F;
    }
  }
  engine.set_data(state);
  generator.set_engine(engine);
}

bool is_served(const Bernoulli::Stack& stack) {
  const at::Tensor& tensor = stack[0].toTensor();
  if (!tensor.defined() || !tensor.is_cpu() || tensor.scalar_type() != at::kFloat) return false;
  if (!is_plain(tensor) || tensor.is_neg()) return false;
  if (!tensor.is_contiguous() || tensor.numel() == 0) return false;
  if (!stack[1].isDouble() || !stack[2].isGenerator()) return false;
  const double probability = stack[1].toDouble();
  return probability >= 0 && probability <= 1 && stack[2].toGenerator().device().is_cpu();
}

void compute(const Bernoulli::Stack& stack, const at::Tensor& into,
             const at::Generator& generator) {
  auto* own = at::check_generator<at::CPUGeneratorImpl>(generator);
  fill(into.mutable_data_ptr<float>(), into.numel(), stack[1].toDouble(), *own);
}

bool same_state(const at::Generator& one, const at::Generator& other) {
  const Engine first = at::check_generator<at::CPUGeneratorImpl>(one)->engine().data();
  const Engine second = at::check_generator<at::CPUGeneratorImpl>(other)->engine().data();
  return first.left_ == second.left_ && first.next_ == second.next_ &&
         first.state_ == second.state_;
}

}  // namespace

std::unique_ptr<Bernoulli> Bernoulli::of(const c10::FunctionSchema& schema) {
  const bool is_it = schema.name() == "aten::bernoulli_" && schema.overload_name() == "float";
  return is_it ? std::make_unique<Bernoulli>() : nullptr;
}

void Bernoulli::take(const c10::OperatorHandle& handle, Stack& stack) {
  if (!is_exact_ || !is_served(stack)) return handle.callBoxed(stack);
  compute(stack, stack[0].toTensor(), stack[2].toGenerator());
  stack.resize(1);
}

void Bernoulli::learn(const c10::OperatorHandle& handle, Stack& stack) {
  if (!is_served(stack)) return handle.callBoxed(stack);
  const Stack before = stack;
  const at::Generator own = before[2].toGenerator().clone();
  handle.callBoxed(stack);
  const OutsideLane outside;
  const at::Tensor& expected = stack[0].toTensor();
  const at::Tensor found = at::empty_like(expected);
  compute(before, found, own);
  is_exact_ = same_bits(expected, found) && same_state(own, before[2].toGenerator());
}

}  // namespace waterflow
