#include "runtime/max_pool.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "runtime/outside.h"

namespace waterflow {
namespace {

// So many outputs are worth another thread.
constexpr int64_t kOutputsOfThread = int64_t{1} << 14;

// Outputs that are made together, in one register of any processor.
constexpr int kTogether = 4;
typedef float Values __attribute__((vector_size(kTogether * sizeof(float))));
typedef int32_t Places __attribute__((vector_size(kTogether * sizeof(int32_t))));

struct Window {
  int64_t size, stride, padding;  // along one dimension
  int64_t first(int64_t output) const { return output * stride - padding; }
};

std::optional<Window> window(const MaxPool::Stack& stack, std::size_t dimension) {
  const auto at = [&](int place) {
    const auto& values = stack[place].toIntList();
    return values.size() == 1 ? values[0] : values[dimension];
  };
  if (at(4) != 1) return std::nullopt;  // there are gaps between its values
  return Window{at(1), stack[2].toIntList().empty() ? at(1) : at(2), at(3)};
}

struct Images {
  int64_t height, width, out_height, out_width;
  Window rows, columns;

  void pool(const float* image, float* values, int64_t* indices) const {
    // The outputs between those whose windows reach beyond the image.
    const int64_t begin =
        std::min(out_width, (columns.padding + columns.stride - 1) / columns.stride);
    const int64_t room = width + columns.padding - columns.size;
    const int64_t end =
        std::max(begin, std::min(out_width, room < 0 ? 0 : room / columns.stride + 1));
    const bool together = end - begin >= kTogether;
    for (int64_t row = 0; row < out_height; ++row, values += out_width, indices += out_width) {
      const int64_t top = std::max<int64_t>(rows.first(row), 0);
      const int64_t bottom = std::min(rows.first(row) + rows.size, height);
      for (int64_t next = 0; next < out_width;) {
        if (together && begin <= next && next < end) {
          const int64_t i = std::min(next, end - kTogether);  // some twice, and nothing beyond
          several(image, top, bottom, columns.first(i), values + i, indices + i);
          next = i + kTogether;
        } else {
          one(image, top, bottom, columns.first(next), values + next, indices + next);
          ++next;
        }
      }
    }
  }

 private:
  void one(const float* image, int64_t top, int64_t bottom, int64_t first, float* value,
           int64_t* index) const {
    const int64_t left = std::max<int64_t>(first, 0), right = std::min(first + columns.size, width);
    float largest = -std::numeric_limits<float>::infinity();
    int64_t place = top * width + left;
    for (int64_t line = top; line < bottom; ++line) {
      for (int64_t at = line * width + left; at < line * width + right; ++at) {
        if (image[at] > largest || std::isnan(image[at])) {
          largest = image[at];
          place = at;
        }
      }
    }
    *value = largest;
    *index = place;
  }

  // Without jumps: in real images it is a toss of a coin whether a value is the largest so far.
  void several(const float* image, int64_t top, int64_t bottom, int64_t first, float* values,
               int64_t* indices) const {
    const int64_t step = columns.stride;
    const int32_t by = static_cast<int32_t>(step);
    const Places apart = {0, by, 2 * by, 3 * by};
    const float lowest = -std::numeric_limits<float>::infinity();
    Values largest = {lowest, lowest, lowest, lowest};
    Places places = static_cast<int32_t>(top * width + first) + apart;
    for (int64_t line = top; line < bottom; ++line) {
      for (int64_t at = line * width + first; at < line * width + first + columns.size; ++at) {
        const float* next = image + at;
        const Values value = {next[0], next[step], next[2 * step], next[3 * step]};
        const Places takes = (value > largest) | (value != value);
        largest = takes ? value : largest;
        places = takes ? static_cast<int32_t>(at) + apart : places;
      }
    }
    for (int k = 0; k < kTogether; ++k) {
      values[k] = largest[k];
      indices[k] = places[k];
    }
  }
};

bool is_served(const MaxPool::Stack& stack) {
  const at::Tensor& image = stack[0].toTensor();
  return image.defined() && image.is_cpu() && image.scalar_type() == at::kFloat &&
         is_plain(image) && !image.is_neg() && image.dim() >= 3 && image.numel() > 0 &&
         image.is_contiguous() && image.size(-1) * image.size(-2) < (int64_t{1} << 31) &&
         window(stack, 0) && window(stack, 1);
}

void compute(const MaxPool::Stack& stack, const at::Tensor& values, const at::Tensor& indices) {
  const at::Tensor& image = stack[0].toTensor();
  const Images images{image.size(-2),  image.size(-1),    values.size(-2),
                      values.size(-1), *window(stack, 0), *window(stack, 1)};
  const int64_t in = images.height * images.width, out = images.out_height * images.out_width;
  const float* from = image.const_data_ptr<float>();
  float* largest = values.mutable_data_ptr<float>();
  int64_t* found = indices.mutable_data_ptr<int64_t>();
  const int64_t planes = image.numel() / in;
  at::parallel_for(0, planes, std::max<int64_t>(1, kOutputsOfThread / out),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t plane = begin; plane < end; ++plane) {
                       images.pool(from + plane * in, largest + plane * out, found + plane * out);
                     }
                   });
}

at::Tensor contiguous(at::IntArrayRef sizes, at::ScalarType type) {
  return at::detail::empty_cpu(sizes, type);
}

}  // namespace

std::unique_ptr<MaxPool> MaxPool::of(const c10::FunctionSchema& schema) {
  const bool is_it =
      schema.name() == "aten::max_pool2d_with_indices" && schema.overload_name().empty();
  return is_it ? std::make_unique<MaxPool>() : nullptr;
}

void MaxPool::take(const c10::OperatorHandle& handle, Stack& stack) {
  if (!image_ || !image_->is_of(stack[0].toTensor())) return handle.callBoxed(stack);
  at::Tensor values = contiguous(sizes_, at::kFloat), indices = contiguous(sizes_, at::kLong);
  compute(stack, values, indices);
  stack.clear();
  stack.emplace_back(std::move(values));
  stack.emplace_back(std::move(indices));
}

void MaxPool::learn(const c10::OperatorHandle& handle, Stack& stack) {
  if (!is_served(stack)) return handle.callBoxed(stack);
  const Stack before = stack;
  handle.callBoxed(stack);
  const at::Tensor &values = stack[0].toTensor(), &indices = stack[1].toTensor();
  if (!values.is_contiguous() || !indices.is_contiguous() || values.numel() == 0) return;
  const OutsideLane outside;
  const at::Tensor own = contiguous(values.sizes(), at::kFloat);
  const at::Tensor places = contiguous(values.sizes(), at::kLong);
  compute(before, own, places);
  if (!same_bits(values, own) || !same_bits(indices, places)) return;
  sizes_ = values.sizes().vec();
  image_.emplace(before[0].toTensor());
}

}  // namespace waterflow
