// Random runs of the allocator: millions of operations in seconds, from one seed, with the
// allocator's own consistency checked every so often and every event judged by the happens-before
// checker.
#pragma once

#include <cstdint>
#include <string>

#include "core/arena/types.h"

namespace waterflow {

struct DriveReport {
  std::uint64_t operations = 0;
  std::uint64_t allocations = 0;  // placed by the allocator
  std::uint64_t planned = 0;      // placed by allocate_at
  std::uint64_t refused = 0;      // out of memory, at a limit, or the planned range taken
  std::uint64_t uses = 0;
  std::uint64_t frees = 0;
  std::uint64_t syncs = 0;
  std::uint64_t resizes = 0;
  std::uint64_t consistency_checks = 0;
  std::uint64_t violations = 0;
  std::string first_violation;
};

// Throws Inconsistent.
DriveReport drive(std::uint64_t seed, std::uint64_t operations, int lanes);

}  // namespace waterflow
