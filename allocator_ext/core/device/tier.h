// A slower tier of memory, and the copy lane that moves blocks between it and an arena.
//
// The tier is one range, in ordinary memory or a mapped file; who lies where in it is planned like
// an arena's addresses. Copies are queued to one thread, the copy lane, and are done beside
// compute. Who waits for a copy helps with what is left of it: a copy that nobody has begun costs
// no more than a memcpy, and one that is half done at most half of it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

namespace waterflow {

// One copy: pieces that the copy lane and whoever waits take from each other.
class Copy {
 public:
  Copy(void* target, const void* source, std::size_t bytes);
  // Copies pieces until none is left to take.
  void help();
  bool done() const { return done_.load(std::memory_order_acquire) == pieces_; }

 private:
  char* const target_;
  const char* const source_;
  const std::size_t bytes_;
  const std::size_t pieces_;
  std::atomic<std::size_t> next_{0};
  std::atomic<std::size_t> done_{0};
};

class Tier {
 public:
  // In ordinary memory, whose pages cost nothing until they are used.
  static std::shared_ptr<Tier> memory(std::size_t bytes);
  // In a file of its own in `folder`, which has no name and is gone with the tier. Throws
  // BackendError where there is no such folder or no room in it.
  static std::shared_ptr<Tier> file(const std::string& folder, std::size_t bytes);
  ~Tier();
  Tier(const Tier&) = delete;
  Tier& operator=(const Tier&) = delete;

  std::size_t capacity() const { return capacity_; }
  void* at(std::size_t offset) const { return static_cast<char*>(base_) + offset; }
  // Bytes that were copied so far, both ways.
  std::size_t moved() const { return moved_.load(); }

  // Queues a copy. Source and target stay as they are until `wait` has returned.
  std::shared_ptr<Copy> copy(void* target, const void* source, std::size_t bytes);
  void wait(Copy& copy);

 private:
  Tier(void* base, std::size_t capacity);
  void serve();

  void* const base_;
  const std::size_t capacity_;
  std::atomic<std::size_t> moved_{0};
  std::mutex mutex_;  // guards the queue and `stop_`
  std::condition_variable queued_;
  std::condition_variable finished_;
  std::deque<std::shared_ptr<Copy>> queue_;
  bool stop_ = false;
  std::thread lane_;
};

}  // namespace waterflow
