// In the place of NVIDIA's driver where there is none: libcuda.so.1 with the functions that ptcfs
// and its Python package call. A device is memory of the process, kernels run on the processor, and
// what a stream is told to do is done when somebody waits for it: who forgets to wait is found out.
// It is for tests of whoever calls the driver; what the device itself does is tested on one.
//
//   PTC_STAND_IN_DEVICES=2    devices (1)
//   PTC_STAND_IN_BYTES=…      memory of each (1 GiB)
//   PTC_STAND_IN_REFUSES=register,read_only,…   what it cannot do
//   PTC_STAND_IN_LEFT=FILE    at the end of the process: what was not given back is written there
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "store/device/kernel_work.h"

namespace {

using Address = unsigned long long;
constexpr int kInvalidValue = 1, kOutOfMemory = 2, kNotInitialised = 3, kNoDevice = 101,
              kAlreadyRegistered = 712, kNotRegistered = 713, kNotPermitted = 800,
              kNotSupported = 801, kInvalidContext = 201;

struct Queue {
  std::vector<std::function<void()>> work;
};
struct Range {
  size_t bytes;
  bool read_only;
};

struct Driver {
  std::mutex mutex;
  std::map<uintptr_t, size_t> allocated, pinned;  // by address
  std::map<uintptr_t, Range> registered;
  std::set<Queue*> queues;
  struct Created {
    size_t bytes;
    bool own;  // else another process has it
    int uses;
  };
  struct Mapped {
    size_t bytes;
    int memory;
  };
  std::map<int, Created> created;        // by memfd
  std::map<uintptr_t, size_t> reserved;  // by address, as the next
  std::map<uintptr_t, Mapped> mapped;
  size_t taken = 0, most_registered = 0, copied_unpinned = 0;
  bool begun = false;

  ~Driver() {
    const char* left = std::getenv("PTC_STAND_IN_LEFT");
    if (left == nullptr) return;
    if (FILE* file = std::fopen(left, "a")) {
      std::fprintf(file,
                   "{\"allocated\": %zu, \"pinned\": %zu, \"registered\": %zu, \"queues\": %zu, "
                   "\"most_registered\": %zu, \"copied_unpinned\": %zu}\n",
                   allocated.size() + created.size() + reserved.size(), pinned.size(),
                   registered.size(), queues.size(), most_registered, copied_unpinned);
      std::fclose(file);
    }
  }

  /// With the mutex.
  int let_go(int memory) {
    const auto found = created.find(memory);
    if (found == created.end()) return kInvalidValue;
    if (--found->second.uses > 0) return 0;
    if (found->second.own) taken -= found->second.bytes;
    ::close(memory);
    created.erase(found);
    return 0;
  }
  static size_t number(const char* name, size_t otherwise) {
    const char* said = std::getenv(name);
    return said != nullptr ? std::strtoull(said, nullptr, 10) : otherwise;
  }
  static bool refuses(const char* what) {
    const char* said = std::getenv("PTC_STAND_IN_REFUSES");
    return said != nullptr &&
           ("," + std::string(said) + ",").find("," + std::string(what) + ",") != std::string::npos;
  }
  template <class Map>
  static bool lies_in(const Map& ranges, uintptr_t begin, size_t bytes) {
    auto after = ranges.upper_bound(begin);
    if (after == ranges.begin()) return false;
    --after;
    return begin + bytes <= after->first + size_of(after->second);
  }
  static size_t size_of(size_t bytes) { return bytes; }
  static size_t size_of(const Range& range) { return range.bytes; }
  /// The device reads and writes it by itself, however many ranges it is in.
  bool is_pinned(uintptr_t begin, size_t bytes) const {
    if (lies_in(allocated, begin, bytes) || lies_in(pinned, begin, bytes)) return true;
    for (const uintptr_t end = begin + bytes; begin < end;) {
      auto after = registered.upper_bound(begin);
      if (after == registered.begin()) return false;
      --after;
      if (begin >= after->first + after->second.bytes) return false;
      begin = after->first + after->second.bytes;
    }
    return true;
  }
};
Driver& driver() {
  static Driver one;
  return one;
}
thread_local int current = -1;  // the device of this thread's context
thread_local std::vector<int> before;
thread_local int capture_mode = 0;

Queue default_queue;
Queue& queue_of(void* stream) {
  return stream != nullptr ? *static_cast<Queue*>(stream) : default_queue;
}
/// With the mutex.
void do_all(Queue& queue) {
  for (const auto& one : queue.work) one();
  queue.work.clear();
}

enum class Kernel : intptr_t { kCopy = 1, kSum = 2 };

}  // namespace

extern "C" {

int cuInit(unsigned) {
  driver().begun = true;
  return Driver::refuses("init") ? kNoDevice : 0;
}
int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}
int cuDeviceGetCount(int* count) {
  if (!driver().begun) return kNotInitialised;
  *count = static_cast<int>(Driver::number("PTC_STAND_IN_DEVICES", 1));
  return 0;
}
int cuDeviceGet(int* device, int number) {
  int count = 0;
  if (const int error = cuDeviceGetCount(&count)) return error;
  if (number < 0 || number >= count) return kNoDevice;
  *device = number;
  return 0;
}
int cuDeviceGetName(char* name, int bytes, int) {
  std::snprintf(name, static_cast<size_t>(bytes), "a stand-in");
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
  const bool shares = (attribute == 102 || attribute == 103) && !Driver::refuses("share");
  *value = attribute == 16 ? 2 : attribute == 113 ? !Driver::refuses("read_only") : shares;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = reinterpret_cast<void*>(static_cast<intptr_t>(device) + 1);
  return 0;
}
int cuDevicePrimaryCtxRelease_v2(int) { return 0; }
int cuCtxSetCurrent(void* context) {
  current = static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1;
  return 0;
}
int cuCtxPushCurrent_v2(void* context) {
  before.push_back(current);
  return cuCtxSetCurrent(context);
}
int cuCtxPopCurrent_v2(void** context) {
  if (before.empty()) return kInvalidContext;
  *context = reinterpret_cast<void*>(static_cast<intptr_t>(current) + 1);
  current = before.back();
  before.pop_back();
  return 0;
}
int cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, capture_mode);
  return 0;
}
int cuCtxGetCurrent(void** context) {
  *context = reinterpret_cast<void*>(static_cast<intptr_t>(current) + 1);
  return 0;
}
int cuMemGetInfo_v2(size_t* free, size_t* total) {
  if (current < 0) return kInvalidContext;
  const std::lock_guard lock(driver().mutex);
  *total = Driver::number("PTC_STAND_IN_BYTES", size_t{1} << 30);
  *free = *total - driver().taken;
  return 0;
}
// One behind the other, as a device's are now and then: a copy is of one of them all the same.
int cuMemAlloc_v2(Address* address, size_t bytes) {
  constexpr size_t kArena = size_t{1} << 40, kAlign = 512;
  static const auto arena = reinterpret_cast<uintptr_t>(::mmap(
      nullptr, kArena, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  static uintptr_t next = arena;
  size_t free = 0, total = 0;
  if (const int error = cuMemGetInfo_v2(&free, &total)) return error;
  if (bytes == 0) return kInvalidValue;
  if (bytes > free) return kOutOfMemory;
  const std::lock_guard lock(driver().mutex);
  *address = next;
  next += (bytes + kAlign - 1) / kAlign * kAlign;
  std::memset(reinterpret_cast<void*>(*address), 0xa5, bytes);
  driver().taken += bytes;
  driver().allocated[*address] = bytes;
  return 0;
}
int cuMemFree_v2(Address address) {
  const std::lock_guard lock(driver().mutex);
  for (Queue* queue : driver().queues) do_all(*queue);  // the driver waits for all of the device
  const auto found = driver().allocated.find(address);
  if (found == driver().allocated.end()) return kInvalidValue;
  const uintptr_t begin = (found->first + 4095) / 4096 * 4096,
                  end = (found->first + found->second) / 4096 * 4096;
  if (begin < end) ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
  driver().taken -= found->second;
  driver().allocated.erase(found);
  return 0;
}
int cuDeviceTotalMem_v2(size_t* bytes, int) {
  *bytes = Driver::number("PTC_STAND_IN_BYTES", size_t{1} << 30);
  return 0;
}
int cuDeviceGetUuid_v2(void* uuid, int device) {
  std::memset(uuid, 0x50 + device, 16);
  return 0;
}
int cuMemGetAllocationGranularity(size_t* bytes, const void*, int) {
  *bytes = size_t{2} << 20;
  return 0;
}
// An allocation is a memfd, and its number one more.
int cuMemCreate(unsigned long long* allocation, size_t bytes, const void*, unsigned long long) {
  size_t free = 0, total = 0;
  if (const int error = cuMemGetInfo_v2(&free, &total)) return error;
  if (bytes > free) return kOutOfMemory;
  const int memory = ::memfd_create("stand-in", MFD_CLOEXEC);
  if (memory < 0 || ::ftruncate(memory, static_cast<off_t>(bytes)) != 0) return kOutOfMemory;
  const std::lock_guard lock(driver().mutex);
  driver().taken += bytes;
  driver().created[memory] = {bytes, true, 1};
  *allocation = static_cast<unsigned long long>(memory) + 1;
  return 0;
}
int cuMemImportFromShareableHandle(unsigned long long* allocation, void* handle, int type) {
  const int memory =
      ::fcntl(static_cast<int>(reinterpret_cast<intptr_t>(handle)), F_DUPFD_CLOEXEC, 0);
  struct stat stat = {};
  if (type != 1 || memory < 0 || ::fstat(memory, &stat) != 0) return kInvalidValue;
  const std::lock_guard lock(driver().mutex);
  driver().created[memory] = {static_cast<size_t>(stat.st_size), false, 1};
  *allocation = static_cast<unsigned long long>(memory) + 1;
  return 0;
}
int cuMemExportToShareableHandle(void* handle, unsigned long long allocation, int type,
                                 unsigned long long) {
  const int memory = ::fcntl(static_cast<int>(allocation) - 1, F_DUPFD_CLOEXEC, 0);
  if (type != 1 || memory < 0) return kInvalidValue;
  std::memcpy(handle, &memory, sizeof memory);
  return 0;
}
int cuMemRelease(unsigned long long allocation) {
  const std::lock_guard lock(driver().mutex);
  return driver().let_go(static_cast<int>(allocation) - 1);
}
int cuMemAddressReserve(Address* begin, size_t bytes, size_t, Address, unsigned long long) {
  void* place =
      ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (place == MAP_FAILED) return kOutOfMemory;
  const std::lock_guard lock(driver().mutex);
  driver().reserved[reinterpret_cast<uintptr_t>(place)] = bytes;
  *begin = reinterpret_cast<uintptr_t>(place);
  return 0;
}
int cuMemAddressFree(Address begin, size_t bytes) {
  const std::lock_guard lock(driver().mutex);
  if (driver().reserved.erase(begin) == 0) return kInvalidValue;
  ::munmap(reinterpret_cast<void*>(begin), bytes);
  return 0;
}
int cuMemMap(Address begin, size_t bytes, size_t offset, unsigned long long allocation,
             unsigned long long) {
  const std::lock_guard lock(driver().mutex);
  const int memory = static_cast<int>(allocation) - 1;
  const auto created = driver().created.find(memory);
  if (created == driver().created.end() || offset + bytes > created->second.bytes ||
      !Driver::lies_in(driver().reserved, begin, bytes))
    return kInvalidValue;
  if (::mmap(reinterpret_cast<void*>(begin), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, memory,
             static_cast<off_t>(offset)) == MAP_FAILED)
    return kInvalidValue;
  ++created->second.uses;
  driver().mapped[begin] = {bytes, memory};
  driver().allocated[begin] = bytes;
  return 0;
}
int cuMemSetAccess(Address begin, size_t bytes, const int* access, size_t) {
  const int rights = access[2] == 3 ? PROT_READ | PROT_WRITE : access[2] == 1 ? PROT_READ : 0;
  return ::mprotect(reinterpret_cast<void*>(begin), bytes, rights) == 0 ? 0 : kInvalidValue;
}
int cuMemUnmap(Address begin, size_t bytes) {
  const std::lock_guard lock(driver().mutex);
  const auto found = driver().mapped.find(begin);
  if (found == driver().mapped.end() || found->second.bytes != bytes) return kInvalidValue;
  for (Queue* queue : driver().queues) do_all(*queue);
  ::mmap(reinterpret_cast<void*>(begin), bytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  const int memory = found->second.memory;
  driver().mapped.erase(found);
  driver().allocated.erase(begin);
  return driver().let_go(memory);
}
int cuMemHostAlloc(void** begin, size_t bytes, unsigned) {
  if (current < 0) return kInvalidContext;
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED || Driver::refuses("pinned")) return kOutOfMemory;
  const std::lock_guard lock(driver().mutex);
  driver().pinned[reinterpret_cast<uintptr_t>(memory)] = bytes;
  *begin = memory;
  return 0;
}
int cuMemFreeHost(void* begin) {
  const std::lock_guard lock(driver().mutex);
  const auto found = driver().pinned.find(reinterpret_cast<uintptr_t>(begin));
  if (found == driver().pinned.end()) return kInvalidValue;
  ::munmap(begin, found->second);
  driver().pinned.erase(found);
  return 0;
}
int cuMemHostRegister_v2(void* begin, size_t bytes, unsigned flags) {
  if (current < 0) return kInvalidContext;
  if (bytes == 0) return kInvalidValue;
  if (Driver::refuses("register")) return kNotPermitted;
  const bool read_only = (flags & 8) != 0;
  if (read_only && Driver::refuses("read_only")) return kNotSupported;
  const std::lock_guard lock(driver().mutex);
  const auto at = reinterpret_cast<uintptr_t>(begin);
  auto& ranges = driver().registered;
  const auto after = ranges.lower_bound(at + bytes);
  if (after != ranges.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second.bytes > at) return kAlreadyRegistered;
  }
  ranges[at] = {bytes, read_only};
  driver().most_registered = std::max(driver().most_registered, ranges.size());
  return 0;
}
int cuMemHostUnregister(void* begin) {
  const std::lock_guard lock(driver().mutex);
  for (Queue* queue : driver().queues)
    if (!queue->work.empty()) return kInvalidValue;  // pages that are still written to
  return driver().registered.erase(reinterpret_cast<uintptr_t>(begin)) > 0 ? 0 : kNotRegistered;
}
int cuMemcpyAsync(Address target, Address source, size_t bytes, void* stream) {
  if (current < 0) return kInvalidContext;
  const std::lock_guard lock(driver().mutex);
  for (const Address end : {target, source})
    if (Driver::lies_in(driver().allocated, end, 1) &&
        !Driver::lies_in(driver().allocated, end, bytes))
      return kInvalidValue;
  Queue& queue = queue_of(stream);
  auto* const to = reinterpret_cast<std::byte*>(target);
  auto* const from = reinterpret_cast<const std::byte*>(source);
  if (!driver().is_pinned(source, bytes)) {  // it is read before this returns
    driver().copied_unpinned += bytes;
    auto copy = std::make_shared<std::vector<std::byte>>(from, from + bytes);
    queue.work.emplace_back([=] { std::memcpy(to, copy->data(), bytes); });
    return 0;
  }
  queue.work.emplace_back([=] { std::memmove(to, from, bytes); });
  if (!driver().is_pinned(target, bytes)) {
    driver().copied_unpinned += bytes;
    do_all(queue);
  }
  return 0;
}
int cuMemcpyHtoDAsync_v2(Address target, const void* source, size_t bytes, void* stream) {
  return cuMemcpyAsync(target, reinterpret_cast<uintptr_t>(source), bytes, stream);
}
int cuMemcpyDtoHAsync_v2(void* target, Address source, size_t bytes, void* stream) {
  return cuMemcpyAsync(reinterpret_cast<uintptr_t>(target), source, bytes, stream);
}
int cuMemsetD8Async(Address begin, unsigned char value, size_t bytes, void* stream) {
  const std::lock_guard lock(driver().mutex);
  queue_of(stream).work.emplace_back(
      [=] { std::memset(reinterpret_cast<void*>(begin), value, bytes); });
  return 0;
}
int cuStreamCreate(void** stream, unsigned) {
  if (current < 0) return kInvalidContext;
  const std::lock_guard lock(driver().mutex);
  auto queue = std::make_unique<Queue>();
  driver().queues.insert(queue.get());
  *stream = queue.release();
  return 0;
}
int cuStreamDestroy_v2(void* stream) {
  const std::lock_guard lock(driver().mutex);
  auto* const queue = static_cast<Queue*>(stream);
  if (driver().queues.erase(queue) == 0) return kInvalidValue;
  do_all(*queue);
  delete queue;
  return 0;
}
int cuStreamSynchronize(void* stream) {
  const std::lock_guard lock(driver().mutex);
  do_all(queue_of(stream));
  return 0;
}
int cuStreamQuery(void* stream) { return cuStreamSynchronize(stream); }
int cuModuleLoadData(void** module, const void*) {
  *module = &default_queue;
  return 0;
}
int cuModuleUnload(void*) { return 0; }
int cuModuleGetFunction(void** function, void*, const char* name) {
  const bool copies = std::strcmp(name, "ptc_copy") == 0;
  *function = reinterpret_cast<void*>(copies ? Kernel::kCopy : Kernel::kSum);
  return copies || std::strcmp(name, "ptc_sum") == 0 ? 0 : kInvalidValue;
}
int cuLaunchKernel(void* function, unsigned groups, unsigned, unsigned, unsigned threads, unsigned,
                   unsigned, unsigned, void* stream, void** parameters, void**) {
  using namespace ptc::kernels;
  if (current < 0) return kInvalidContext;
  if (threads != kThreads || groups == 0) return kInvalidValue;
  uint64_t said[4];
  for (int i = 0; i < 4; ++i) std::memcpy(&said[i], parameters[i], sizeof said[i]);
  const std::lock_guard lock(driver().mutex);
  queue_of(stream).work.emplace_back(
      [function, tasks = said[0], count = said[1], third = said[2], tiles = said[3]] {
        for (uint64_t tile = 0; tile < tiles; ++tile) {
          if (reinterpret_cast<intptr_t>(function) == static_cast<intptr_t>(Kernel::kCopy)) {
            const auto* all = reinterpret_cast<const CopyTask*>(tasks);
            for (uint32_t thread = 0; thread < kThreads; ++thread)
              copy_tile(all[task_of(all, count, tile)], reinterpret_cast<const CopyLevel*>(third),
                        tile, thread);
          } else {
            const auto* all = reinterpret_cast<const SumTask*>(tasks);
            const SumTask& task = all[task_of(all, count, tile)];
            auto* const sums = reinterpret_cast<uint64_t*>(third);
            for (uint32_t thread = 0; thread < kThreads; ++thread) {
              const ThreadSum sum = sum_tile(task, tile, thread);
              sums[2 * task.sum] += sum.lane[0];
              sums[2 * task.sum + 1] += sum.lane[1];
            }
          }
        }
      });
  return 0;
}
int cuGetErrorName(int error, const char** name) {
  *name = error == kOutOfMemory ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_OF_A_STAND_IN";
  return 0;
}
int cuGetErrorString(int error, const char** text) {
  *text = error == kOutOfMemory ? "out of memory" : "refused";
  return 0;
}
}
