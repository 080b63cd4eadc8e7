#include "core/arena/mark.h"

#include <chrono>

namespace waterflow {

double steady_seconds() {
  using namespace std::chrono;
  return duration<double>(steady_clock::now().time_since_epoch()).count();
}

}  // namespace waterflow
