// Copies and runs as a launch needs them (kernel_work.h). Threads: one.
#pragma once

#include <cstdint>
#include <vector>

#include "store/device/kernel_work.h"
#include "store/tensor/strided_copy.h"

namespace ptc {

class CopyLaunch {
 public:
  /// Addresses that `copy` counts from. One of no bytes adds nothing.
  void add(uint64_t source, uint64_t target, const StridedCopy& copy);

  const std::vector<kernels::CopyTask>& tasks() const { return tasks_; }
  const std::vector<kernels::CopyLevel>& levels() const { return levels_; }
  uint64_t tiles() const { return tiles_; }

 private:
  void add_piece(uint64_t source, uint64_t target, StridedCopy copy);
  std::vector<kernels::CopyTask> tasks_;
  std::vector<kernels::CopyLevel> levels_;
  uint64_t tiles_ = 0;
};

class SumLaunch {
 public:
  void add(uint64_t bytes, uint64_t count, uint64_t logical_offset, uint64_t sum);

  const std::vector<kernels::SumTask>& tasks() const { return tasks_; }
  uint64_t tiles() const { return tiles_; }

 private:
  std::vector<kernels::SumTask> tasks_;
  uint64_t tiles_ = 0;
};

}  // namespace ptc
