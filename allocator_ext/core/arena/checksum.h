// Checksums of sets: the sum of a random number of each member. Equal sets have equal sums,
// whatever came and went in between, and members are added and taken away in any order.
#pragma once

#include <cstdint>

namespace waterflow {

// A random number of its own for each number (splitmix64).
inline constexpr std::uint64_t scrambled(std::uint64_t number) {
  std::uint64_t z = (number + 1) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

inline constexpr std::uint64_t scrambled(std::uint64_t first, std::uint64_t second) {
  return scrambled(scrambled(first) ^ second);
}

}  // namespace waterflow
