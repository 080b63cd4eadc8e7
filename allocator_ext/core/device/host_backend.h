// Arenas of host memory, and of no memory at all.
#pragma once

#include <cstddef>

#include "core/arena/backend.h"

namespace waterflow {

// Addresses only: planning and tests.
class VirtualBackend final : public Backend {
 public:
  explicit VirtualBackend(std::size_t capacity) : capacity_(capacity) {}
  void* base() const override { return nullptr; }
  std::size_t capacity() const override { return capacity_; }
  void synchronize() override {}
  bool resize(std::size_t capacity) override {
    capacity_ = capacity;
    return true;
  }

 private:
  std::size_t capacity_;
};

// One anonymous mapping; pages become resident when first written. It is as large as the machine's
// memory where that can be had, so that the capacity may grow with the base where it is: addresses
// that are not used cost nothing.
class HostBackend final : public Backend {
 public:
  explicit HostBackend(std::size_t capacity);
  ~HostBackend() override;
  HostBackend(const HostBackend&) = delete;
  HostBackend& operator=(const HostBackend&) = delete;

  void* base() const override { return base_; }
  std::size_t capacity() const override { return capacity_; }
  // A host lane executes an operator before it frees the operator's memory, so nothing is ever in
  // flight: what a lane has freed, it has finished with.
  void synchronize() override {}
  bool resize(std::size_t capacity) override;
  void give_back(std::size_t offset) override;

 private:
  void use_huge_pages();

  std::size_t capacity_;
  std::size_t mapped_;
  void* base_;
};

}  // namespace waterflow
