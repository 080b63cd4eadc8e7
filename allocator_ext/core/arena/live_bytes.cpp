#include "core/arena/live_bytes.h"

namespace waterflow {

void LiveBytes::expect(int part, std::ptrdiff_t bytes) {
  int used = used_.load();
  while (used <= part && !used_.compare_exchange_weak(used, part + 1)) {
  }
  parts_[part].bound.fetch_add(static_cast<std::size_t>(bytes));  // wraps around where negative
}

void LiveBytes::add(int part, std::ptrdiff_t bytes) {
  const auto change = static_cast<std::size_t>(bytes);
  const std::size_t live = parts_[part].live.fetch_add(change) + change;
  if (bytes > 0) note_growth(parts_[part], live);
}

void LiveBytes::set_fixed(std::size_t bytes) {
  // Nowhere between is the part beyond its bound.
  if (bytes > fixed_.live.load()) {
    fixed_.bound.store(bytes);
    fixed_.live.store(bytes);
    note_growth(fixed_, bytes);
  } else {
    fixed_.live.store(bytes);
    fixed_.bound.store(bytes);
  }
}

std::size_t LiveBytes::planned() const {
  return sum_without(fixed_, [](const Part& part) { return part.live.load(); });
}

void LiveBytes::note_growth(const Part& grown, std::size_t live) {
  std::size_t peak = peak_.load();
  const auto bound = [](const Part& part) { return part.bound.load(); };
  if (live + sum_without(grown, bound) <= peak) return;
  const auto exact = [](const Part& part) { return part.live.load(); };
  const std::size_t sum = live + sum_without(grown, exact);
  while (sum > peak && !peak_.compare_exchange_weak(peak, sum)) {
  }
}

template <typename Member>
std::size_t LiveBytes::sum_without(const Part& left_out, Member member) const {
  std::size_t sum = &left_out == &fixed_ ? 0 : member(fixed_);
  for (int part = 0; part < used_.load(); ++part) {
    if (&left_out != &parts_[part]) sum += member(parts_[part]);
  }
  return sum;
}

}  // namespace waterflow
