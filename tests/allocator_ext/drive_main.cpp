// Runs of the allocator under the eyes of the happens-before checker. Prints one JSON object.
//
//   drive run SEED OPERATIONS LANES   random operations: how many of each, and violations
//   drive example use|free            lane 1 touches a block of lane 0 last, which then wants one
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <string>

#include "core/arena/allocator.h"
#include "core/check/checker.h"
#include "drive.h"

namespace {

using namespace waterflow;

void show(const DriveReport& report) {
  auto print = [](const char* name, std::uint64_t value) {
    std::printf("\"%s\": %llu, ", name, static_cast<unsigned long long>(value));
  };
  std::printf("{");
  print("operations", report.operations);
  print("allocations", report.allocations);
  print("planned", report.planned);
  print("refused", report.refused);
  print("uses", report.uses);
  print("frees", report.frees);
  print("syncs", report.syncs);
  print("resizes", report.resizes);
  print("consistency_checks", report.consistency_checks);
  print("violations", report.violations);
  std::printf("\"first_violation\": \"%s\"}\n", report.first_violation.c_str());
}

void example(bool uses) {
  Allocator allocator(Options{1024});
  allocator.record(true);
  const std::size_t feature_map = allocator.allocate(64, 0, 0).value();
  allocator.synchronize();
  if (uses) allocator.use(feature_map, 1);
  allocator.free(feature_map, uses ? 0 : 1);
  const bool same = allocator.allocate(64, 0, 0) == feature_map;
  const auto found = check_happens_before(allocator.take_log(), 2);
  std::printf("{\"same\": %s, \"violations\": %zu, \"first_violation\": \"%s\"}\n",
              same ? "true" : "false", found.size(),
              found.empty() ? "" : found.front().message.c_str());
}

}  // namespace

int main(int count, char** arguments) {
  try {
    const std::string mode = count > 1 ? arguments[1] : "";
    if (mode == "example" && count == 3) {
      example(arguments[2] == std::string("use"));
    } else if (mode == "run" && count == 5) {
      show(drive(std::strtoull(arguments[2], nullptr, 10), std::strtoull(arguments[3], nullptr, 10),
                 std::atoi(arguments[4])));
    } else {
      throw std::invalid_argument("usage: drive run SEED OPERATIONS LANES | example use|free");
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "drive: %s\n", error.what());
    return 1;
  }
}
