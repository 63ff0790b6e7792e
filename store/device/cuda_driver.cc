#include "store/device/cuda_driver.h"

#include <dlfcn.h>

namespace ptc {
namespace {

Result<CudaDriver> load_driver() {
  // As root may have it; never from the current directory.
  void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr)
    return make_error(Code::kUnavailable, "NVIDIA's driver is not here: {}", ::dlerror());
  CudaDriver driver = {};
  std::string_view missing;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(::dlsym(library, name));
    if (function == nullptr && missing.empty()) missing = name;
  };
  find(driver.cuInit, "cuInit");
  find(driver.cuDriverGetVersion, "cuDriverGetVersion");
  find(driver.cuDeviceGetCount, "cuDeviceGetCount");
  find(driver.cuDeviceGet, "cuDeviceGet");
  find(driver.cuDeviceGetName, "cuDeviceGetName");
  find(driver.cuDeviceGetAttribute, "cuDeviceGetAttribute");
  find(driver.cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
  find(driver.cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2");
  find(driver.cuCtxSetCurrent, "cuCtxSetCurrent");
  find(driver.cuMemGetInfo, "cuMemGetInfo_v2");
  find(driver.cuMemAlloc, "cuMemAlloc_v2");
  find(driver.cuMemFree, "cuMemFree_v2");
  find(driver.cuDeviceTotalMem, "cuDeviceTotalMem_v2");
  find(driver.cuDeviceGetUuid, "cuDeviceGetUuid_v2");
  find(driver.cuMemGetAllocationGranularity, "cuMemGetAllocationGranularity");
  find(driver.cuMemCreate, "cuMemCreate");
  find(driver.cuMemRelease, "cuMemRelease");
  find(driver.cuMemExportToShareableHandle, "cuMemExportToShareableHandle");
  find(driver.cuMemAddressReserve, "cuMemAddressReserve");
  find(driver.cuMemAddressFree, "cuMemAddressFree");
  find(driver.cuMemMap, "cuMemMap");
  find(driver.cuMemUnmap, "cuMemUnmap");
  find(driver.cuMemSetAccess, "cuMemSetAccess");
  find(driver.cuMemHostRegister, "cuMemHostRegister_v2");
  find(driver.cuMemHostUnregister, "cuMemHostUnregister");
  find(driver.cuMemcpyAsync, "cuMemcpyAsync");
  find(driver.cuMemsetD8Async, "cuMemsetD8Async");
  find(driver.cuStreamCreate, "cuStreamCreate");
  find(driver.cuStreamDestroy, "cuStreamDestroy_v2");
  find(driver.cuStreamSynchronize, "cuStreamSynchronize");
  find(driver.cuStreamQuery, "cuStreamQuery");
  find(driver.cuModuleLoadData, "cuModuleLoadData");
  find(driver.cuModuleUnload, "cuModuleUnload");
  find(driver.cuModuleGetFunction, "cuModuleGetFunction");
  find(driver.cuLaunchKernel, "cuLaunchKernel");
  find(driver.cuGetErrorName, "cuGetErrorName");
  find(driver.cuGetErrorString, "cuGetErrorString");
  if (!missing.empty())
    return make_error(Code::kUnavailable, "NVIDIA's driver is too old: it has no {}", missing);
  PTC_TRY(driver.check(driver.cuInit(0), "cuInit"));
  return driver;
}

}  // namespace

Result<const CudaDriver*> CudaDriver::load() {
  static const ptc::Result<CudaDriver> loaded = load_driver();
  if (loaded.has_error()) return Error(loaded.error());
  return &loaded.value();
}

Result<> CudaDriver::check(Result result, std::string_view what) const {
  if (result == 0) return ok();
  const char *name = nullptr, *text = nullptr;
  cuGetErrorName(result, &name);
  cuGetErrorString(result, &text);
  return make_error(Code::kUnavailable, "{}: {} ({})", what, text != nullptr ? text : "failed",
                    name != nullptr ? std::string(name) : std::to_string(result));
}

}  // namespace ptc
