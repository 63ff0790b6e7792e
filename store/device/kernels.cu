// Launched by cuda_device.cc, with kThreads threads a group and any number of groups.
#include "store/device/kernel_work.h"

using namespace ptc::kernels;

extern "C" __global__ void __launch_bounds__(kThreads)
    ptc_copy(const CopyTask* tasks, uint64_t count, const CopyLevel* levels, uint64_t tiles) {
  for (uint64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x)
    copy_tile(tasks[task_of(tasks, count, tile)], levels, tile, threadIdx.x);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    ptc_sum(const SumTask* tasks, uint64_t count, unsigned long long* sums, uint64_t tiles) {
  for (uint64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const SumTask task = tasks[task_of(tasks, count, tile)];
    ThreadSum sum = sum_tile(task, tile, threadIdx.x);
    for (int step = 16; step > 0; step /= 2) {
      sum.lane[0] += __shfl_down_sync(0xffffffff, sum.lane[0], step);
      sum.lane[1] += __shfl_down_sync(0xffffffff, sum.lane[1], step);
    }
    // Sums may be added in any order.
    if (threadIdx.x % 32 == 0) {
      atomicAdd(&sums[2 * task.sum], static_cast<unsigned long long>(sum.lane[0]));
      atomicAdd(&sums[2 * task.sum + 1], static_cast<unsigned long long>(sum.lane[1]));
    }
  }
}
