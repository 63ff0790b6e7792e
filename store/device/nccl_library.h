// NVIDIA's NCCL, as far as it is used here. Loaded when it is asked for, as the driver is
// (cuda_driver.h): nothing of it is needed where this is built. Names, numbers and the
// configuration are those of NCCL 2.18, which later versions take.
#pragma once

#include <cstddef>
#include <string>

#include "store/base/error.h"

namespace ptc {

struct NcclLibrary {
  using Result = int;
  using Communicator = void*;
  using Stream = void*;

  static constexpr Result kSuccess = 0, kInProgress = 7;
  static constexpr int kInt8 = 0;
  struct UniqueId {
    char bytes[128];
  };
  /// What is left as it is here is NCCL's own choice.
  struct Config {
    static constexpr int kOwnChoice = -2147483647 - 1;
    size_t size = sizeof(Config);
    unsigned magic = 0xcafebeef;
    unsigned version = 21800;
    int blocking = kOwnChoice;  // 0: calls return at once
    int thread_group_cluster = kOwnChoice;
    int fewest_thread_groups = kOwnChoice, most_thread_groups = kOwnChoice;
    const char* network = nullptr;
    int split_share = kOwnChoice;
  };

  Result (*ncclGetVersion)(int* version);
  Result (*ncclGetUniqueId)(UniqueId* id);
  Result (*ncclCommInitRankConfig)(Communicator* communicator, int ranks, UniqueId id, int rank,
                                   Config* config);
  Result (*ncclCommGetAsyncError)(Communicator communicator, Result* state);
  Result (*ncclCommAbort)(Communicator communicator);
  Result (*ncclSend)(const void* bytes, size_t count, int type, int peer, Communicator communicator,
                     Stream stream);
  Result (*ncclRecv)(void* bytes, size_t count, int type, int peer, Communicator communicator,
                     Stream stream);
  const char* (*ncclGetErrorString)(Result error);
  const char* (*ncclGetLastError)(Communicator communicator);
  std::string name;  // "NCCL 2.27.3"

  /// Loaded once, and never unloaded. kUnavailable: it is not there, or too old; says what to do.
  static ptc::Result<const NcclLibrary*> load();

  /// kUnavailable: "ncclSend: unhandled system error (…)"; ok for success, and where it is begun.
  ptc::Result<> check(Result result, const char* what, Communicator communicator = nullptr) const;
};

}  // namespace ptc
