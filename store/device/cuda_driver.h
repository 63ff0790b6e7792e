// NVIDIA's driver, as far as it is used here. Loaded when it is asked for: a program that has this
// runs where there is none, too. Names, types and numbers are those of the driver's interface,
// which stays as it is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "store/base/error.h"

namespace ptc {

struct CudaDriver {
  using Result = int;  // 0: success
  using Device = int;
  using Context = void*;
  using Module = void*;
  using Function = void*;
  using Stream = void*;
  using Address = unsigned long long;  // of the device's or of registered memory

  static constexpr Result kOutOfMemory = 2, kNotReady = 600, kAlreadyRegistered = 712;
  static constexpr unsigned kNonBlocking = 1;  // of streams
  static constexpr unsigned kPortable = 1;     // of registered memory: for all contexts

  Result (*cuInit)(unsigned flags);
  Result (*cuDriverGetVersion)(int* version);
  Result (*cuDeviceGetCount)(int* count);
  Result (*cuDeviceGet)(Device* device, int number);
  Result (*cuDeviceGetName)(char* name, int bytes, Device device);
  Result (*cuDeviceGetAttribute)(int* value, int attribute, Device device);
  Result (*cuDevicePrimaryCtxRetain)(Context* context, Device device);
  Result (*cuDevicePrimaryCtxRelease)(Device device);
  Result (*cuCtxSetCurrent)(Context context);
  Result (*cuMemGetInfo)(size_t* free, size_t* total);
  Result (*cuMemAlloc)(Address* address, size_t bytes);
  Result (*cuMemFree)(Address address);
  Result (*cuMemHostRegister)(void* begin, size_t bytes, unsigned flags);
  Result (*cuMemHostUnregister)(void* begin);
  Result (*cuMemcpyAsync)(Address target, Address source, size_t bytes, Stream stream);
  Result (*cuMemsetD8Async)(Address begin, unsigned char value, size_t bytes, Stream stream);
  Result (*cuStreamCreate)(Stream* stream, unsigned flags);
  Result (*cuStreamDestroy)(Stream stream);
  Result (*cuStreamSynchronize)(Stream stream);
  Result (*cuStreamQuery)(Stream stream);
  Result (*cuModuleLoadData)(Module* module, const void* image);
  Result (*cuModuleUnload)(Module module);
  Result (*cuModuleGetFunction)(Function* function, Module module, const char* name);
  Result (*cuLaunchKernel)(Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                           unsigned block_x, unsigned block_y, unsigned block_z,
                           unsigned shared_bytes, Stream stream, void** parameters, void** extra);
  Result (*cuGetErrorName)(Result error, const char** name);
  Result (*cuGetErrorString)(Result error, const char** text);

  /// Loaded once, and never unloaded. kUnavailable says what is missing: the driver, or a function
  /// of it that older ones have not.
  static ptc::Result<const CudaDriver*> load();

  /// kUnavailable: "cuMemAlloc: out of memory (CUDA_ERROR_OUT_OF_MEMORY)"; ok for success.
  ptc::Result<> check(Result result, std::string_view what) const;
};

}  // namespace ptc
