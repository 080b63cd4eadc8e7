// Where an arena's bytes come from. The allocator decides on offsets only, so that one allocator
// serves every kind of memory.
#pragma once

#include <cstddef>
#include <cstring>
#include <vector>

namespace waterflow {

struct CopyOf {
  void* target;
  const void* source;
  std::size_t bytes;
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual void* base() const = 0;  // of one contiguous range; nullptr: addresses without memory
  virtual std::size_t capacity() const = 0;
  virtual void synchronize() = 0;                 // makes the lanes wait for each other
  virtual bool resize(std::size_t capacity) = 0;  // the base stays; false changes nothing
  virtual void commit() {}                        // takes memory that was only reserved so far
  virtual std::size_t taken() const { return capacity(); }  // bytes of memory it holds now
  // Gives back the memory from `offset` on, in whole pages; nobody will use it again.
  virtual void give_back(std::size_t) {}
  virtual void finish() {}  // the host waits for the lanes' work
  // Copies bytes into, within or out of the arena when no lane is at work.
  virtual void copy(void* target, const void* source, std::size_t bytes) {
    std::memcpy(target, source, bytes);
  }
  // The same for many, in any order.
  virtual void copy_all(const std::vector<CopyOf>& copies) {
    for (const CopyOf& one : copies) copy(one.target, one.source, one.bytes);
  }
};

}  // namespace waterflow
