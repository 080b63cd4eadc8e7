// A mutex that tries for a moment before it sleeps: what it guards takes a fraction of a
// microsecond, putting a lane to sleep and waking it takes many.
#pragma once

#include <mutex>

namespace waterflow {

class PatientMutex {
 public:
  void lock() {
    for (int attempt = 0; attempt < kAttempts; ++attempt) {
      if (mutex_.try_lock()) return;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    mutex_.lock();
  }
  void unlock() { mutex_.unlock(); }

 private:
  static constexpr int kAttempts = 200;
  std::mutex mutex_;
};

}  // namespace waterflow
