// A GPU of NVIDIA's, by its driver.
//
// A thread that calls one of its functions has the device's context from then on. Kernels are those
// of kernels.cu, which the build puts into the program where it finds nvcc.
#pragma once

#include <cstdint>
#include <memory>

#include "store/base/error.h"
#include "store/device/device.h"

namespace ptc {

/// How many there are; 0 where there is no driver.
uint32_t cuda_device_count();

/// Whether the kernels are in this program.
bool has_cuda_kernels();

/// kUnavailable: no driver, no such device, or a program without the kernels: says which, and what
/// to do. Outlives all that it gave.
Result<std::unique_ptr<Device>> open_cuda_device(uint32_t number);

}  // namespace ptc
