#include "store/device/nccl_library.h"

#include <dlfcn.h>

#include <string_view>
#include <type_traits>

namespace ptc {
namespace {

constexpr int kOldestVersion = 21800;

Result<NcclLibrary> load_nccl() {
  // As LD_LIBRARY_PATH and the system say; never from the current directory.
  void* const library = ::dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr)
    return make_error(Code::kUnavailable,
                      "NCCL is not here ({}): install libnccl2 of NVIDIA's packages, or Python's "
                      "nvidia-nccl-cu13 and set LD_LIBRARY_PATH to its nvidia/nccl/lib",
                      ::dlerror());
  NcclLibrary nccl = {};
  std::string_view missing;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(::dlsym(library, name));
    if (function == nullptr && missing.empty()) missing = name;
  };
  find(nccl.ncclGetVersion, "ncclGetVersion");
  find(nccl.ncclGetUniqueId, "ncclGetUniqueId");
  find(nccl.ncclCommInitRankConfig, "ncclCommInitRankConfig");
  find(nccl.ncclCommGetAsyncError, "ncclCommGetAsyncError");
  find(nccl.ncclCommAbort, "ncclCommAbort");
  find(nccl.ncclSend, "ncclSend");
  find(nccl.ncclRecv, "ncclRecv");
  find(nccl.ncclGetErrorString, "ncclGetErrorString");
  find(nccl.ncclGetLastError, "ncclGetLastError");
  if (!missing.empty())
    return make_error(Code::kUnavailable, "NCCL is too old: it has no {}", missing);
  int version = 0;
  PTC_TRY(nccl.check(nccl.ncclGetVersion(&version), "ncclGetVersion"));
  nccl.name = fmt::format("NCCL {}.{}.{}", version / 10000, version / 100 % 100, version % 100);
  if (version < kOldestVersion)
    return make_error(Code::kUnavailable, "{} is too old: 2.18 or later is needed", nccl.name);
  return nccl;
}

}  // namespace

Result<const NcclLibrary*> NcclLibrary::load() {
  static const ptc::Result<NcclLibrary> loaded = load_nccl();
  if (loaded.has_error()) return Error(loaded.error());
  return &loaded.value();
}

Result<> NcclLibrary::check(Result result, const char* what, Communicator communicator) const {
  if (result == kSuccess || result == kInProgress) return ok();
  const char* const text = ncclGetErrorString(result);
  const char* const more = ncclGetLastError(communicator);
  return make_error(Code::kUnavailable, "{}: {}{}{}", what, text != nullptr ? text : "failed",
                    more != nullptr && *more != '\0' ? ": " : "", more != nullptr ? more : "");
}

}  // namespace ptc
