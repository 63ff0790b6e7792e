// Links by NVIDIA's NCCL: over NVLink, InfiniBand, RoCE or sockets, whichever it finds to be best.
//
// A link is a communicator of two ranks, and not a part of one of all nodes. So a node that dies
// breaks its own links alone, and a pair needs no order that all nodes agree on: bytes are asked
// for by who needs them. It costs each pair memory of its own, so few are kept.
#pragma once

#include <chrono>
#include <memory>

#include "store/base/error.h"
#include "store/device/cuda_driver.h"
#include "store/device/device_link.h"
#include "store/device/nccl_library.h"

namespace ptc {

/// For devices of open_cuda_device(). NCCL reads its own variables (NCCL_SOCKET_IFNAME,
/// NCCL_IB_HCA, NCCL_MULTI_RANK_GPU_ENABLE …) from the environment. kUnavailable: neither NCCL nor
/// the driver is here, or one is too old; says what to do.
Result<std::unique_ptr<DeviceLinkMaker>> make_nccl_links();

/// With this driver and this library, which are there until the process ends. The maker's end waits
/// no longer than `longest_end` for links that NCCL does not let go of; their memory is then lost.
std::unique_ptr<DeviceLinkMaker> make_nccl_links(
    const CudaDriver& driver, const NcclLibrary& nccl,
    std::chrono::milliseconds longest_end = std::chrono::seconds(20));

}  // namespace ptc
