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
  using Address = unsigned long long;     // of the device's or of registered memory
  using Allocation = unsigned long long;  // memory, whether it has an address or not
  struct Location {
    int type = 1;  // a device
    int device = 0;
  };
  struct AllocationKind {
    int type = 1;     // pinned: where it is said to be
    int handles = 1;  // file descriptors
    Location location;
    void* unused = nullptr;
    unsigned char compression = 0, for_rdma = 0;
    unsigned short usage = 0;
    unsigned char reserved[4] = {};
  };
  static_assert(sizeof(AllocationKind) == 32);
  struct Access {
    Location location;
    int flags = 3;  // reading and writing
  };
  struct Uuid {
    std::byte bytes[16];
  };

  static constexpr Result kOutOfMemory = 2, kNotReady = 600, kAlreadyRegistered = 712;
  static constexpr unsigned kNonBlocking = 1;  // of streams
  static constexpr unsigned kPortable = 1;     // of registered memory: for all contexts
  static constexpr int kFileDescriptor = 1;    // of handles
  // Attributes of devices.
  static constexpr int kProcessors = 16, kManagesAddresses = 102, kSharesByDescriptor = 103,
                       kRdmaOfAllocations = 110;

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
  Result (*cuDeviceTotalMem)(size_t* bytes, Device device);
  Result (*cuDeviceGetUuid)(Uuid* uuid, Device device);
  Result (*cuMemGetAllocationGranularity)(size_t* bytes, const AllocationKind* kind, int option);
  Result (*cuMemCreate)(Allocation* allocation, size_t bytes, const AllocationKind* kind,
                        unsigned long long flags);
  Result (*cuMemRelease)(Allocation allocation);
  Result (*cuMemExportToShareableHandle)(void* handle, Allocation allocation, int type,
                                         unsigned long long flags);
  Result (*cuMemAddressReserve)(Address* begin, size_t bytes, size_t alignment, Address wanted,
                                unsigned long long flags);
  Result (*cuMemAddressFree)(Address begin, size_t bytes);
  Result (*cuMemMap)(Address begin, size_t bytes, size_t offset, Allocation allocation,
                     unsigned long long flags);
  Result (*cuMemUnmap)(Address begin, size_t bytes);
  Result (*cuMemSetAccess)(Address begin, size_t bytes, const Access* access, size_t count);
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
