// A job's random streams, private to the thread that works for it. While a RandomScope is open on a
// thread, every random operator of that thread draws from the job's generators; no other thread
// sees anything of it, and operators that draw nothing cost nothing more.
#pragma once

#include <ATen/core/Generator.h>

#include <optional>

namespace waterflow {

// Redirects this thread's random operators to `host`'s and `device`'s streams, which must outlive
// it. Scopes nest: the innermost counts. A generator that an operator is given stays its own,
// unless it is the process's default one.
//
// Operators with a generator as an argument get the job's there, in the dispatcher. On a device
// there are fused ones that have no such argument: only for those the device's default generator
// is lent, one thread at a time, with the job's seed and offset in it.
class RandomScope {
 public:
  RandomScope(const at::Generator& host, const std::optional<at::Generator>& device);
  ~RandomScope();
  RandomScope(const RandomScope&) = delete;
  RandomScope& operator=(const RandomScope&) = delete;

  // The job's stream for operators on `device`, if it has one there.
  const at::Generator* stream(c10::Device device) const;

 private:
  const at::Generator& host_;
  const std::optional<at::Generator>& device_;
  const RandomScope* former_;
};

// Registers what scopes need; once, before threads run operators.
void prepare_random_scopes();

}  // namespace waterflow
