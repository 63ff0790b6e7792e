#include "store/device/cuda_device.h"

#include <algorithm>
#include <array>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "store/base/mutex.h"
#include "store/base/size_text.h"
#include "store/device/cuda_driver.h"
#include "store/device/launch.h"

// The kernels for all architectures (cuda_kernels.cc.in), or none.
extern "C" const unsigned char ptc_cuda_kernels[];
extern "C" const size_t ptc_cuda_kernels_bytes;

namespace ptc {
namespace {

class CudaDevice;

/// Memory of the device that grows, for the tasks of launches.
class TaskMemory {
 public:
  explicit TaskMemory(const CudaDriver& driver) : driver_(driver) {}
  ~TaskMemory() {
    if (begin_ != 0) driver_.cuMemFree(begin_);
  }
  TaskMemory(const TaskMemory&) = delete;
  TaskMemory& operator=(const TaskMemory&) = delete;

  Result<CudaDriver::Address> of(uint64_t bytes) {
    if (bytes <= bytes_) return begin_;
    if (begin_ != 0) driver_.cuMemFree(begin_);
    begin_ = bytes_ = 0;
    const uint64_t more = std::max<uint64_t>(bytes + bytes / 2, 1 << 20);
    PTC_TRY(driver_.check(driver_.cuMemAlloc(&begin_, more), "memory for the tasks of a launch"));
    bytes_ = more;
    return begin_;
  }

 private:
  const CudaDriver& driver_;
  CudaDriver::Address begin_ = 0;
  uint64_t bytes_ = 0;
};

class CudaStream final : public DeviceStream {
 public:
  CudaStream(CudaDevice* device, const CudaDriver& driver, CudaDriver::Stream stream)
      : device_(device), driver_(driver), stream_(stream), tasks_(driver), results_(driver) {}
  ~CudaStream() override;

  Result<> copy(MemoryPointer target, ConstMemoryPointer source, uint64_t bytes) override;
  Result<> zero(MemoryPointer begin, uint64_t bytes) override;
  Result<> copy_strided(std::span<const DeviceCopy> copies) override;
  Result<> add_checksums(std::span<const DeviceRun> runs, std::span<Checksum> sums) override;
  Result<> wait() override;

 private:
  Result<> begin();
  /// Sticky: what comes later would be in doubt.
  Result<> check(CudaDriver::Result result, std::string_view what);
  Result<uint64_t> of_device(NodeMemory memory, uintptr_t address) const;
  /// Copies tables to the device, one behind the other, each at a multiple of 16.
  template <class... Table>
  Result<std::array<CudaDriver::Address, sizeof...(Table)>> upload(const Table&... tables);

  CudaDevice* const device_;
  const CudaDriver& driver_;
  const CudaDriver::Stream stream_;
  TaskMemory tasks_, results_;
  bool tasks_in_use_ = false;  // of a launch that was not waited for
  Result<> failed_ = ok();
  struct Sums {
    std::span<Checksum> to;
    std::vector<Checksum> found;
  };
  std::unique_ptr<Sums> sums_;  // null: none is asked for
};

class CudaDevice final : public Device {
 public:
  CudaDevice(const CudaDriver& driver, uint32_t number) : driver_(driver), number_(number) {}
  ~CudaDevice() override {
    if (context_ == nullptr) return;
    (void)driver_.cuCtxSetCurrent(context_);
    if (module_ != nullptr) driver_.cuModuleUnload(module_);
    driver_.cuDevicePrimaryCtxRelease(device_);
  }

  Result<> open() {
    const auto check = [this](CudaDriver::Result result, std::string_view what) {
      return driver_.check(result, what);
    };
    PTC_TRY(check(driver_.cuDeviceGet(&device_, static_cast<int>(number_)), "cuDeviceGet"));
    std::array<char, 256> name{};
    PTC_TRY(
        check(driver_.cuDeviceGetName(name.data(), name.size() - 1, device_), "cuDeviceGetName"));
    name_ = name.data();
    PTC_TRY(check(driver_.cuDeviceGetAttribute(&processors_, CudaDriver::kProcessors, device_),
                  "cuDeviceGetAttribute"));
    CudaDriver::Uuid uuid = {};
    PTC_TRY(check(driver_.cuDeviceGetUuid(&uuid, device_), "cuDeviceGetUuid"));
    std::copy_n(uuid.bytes, id_.size(), id_.begin());
    return check(driver_.cuDeviceTotalMem(&total_, device_), "cuDeviceTotalMem");
  }
  /// This thread calls the driver for this device from now on. The first call takes hundreds of MiB
  /// of the device for its context.
  Result<> enter() {
    {
      MutexLock lock(begin_mutex_);
      if (context_ == nullptr) {
        PTC_TRY(begin());
      }
    }
    return driver_.check(driver_.cuCtxSetCurrent(context_), "cuCtxSetCurrent");
  }

  NodeMemory memory() const override { return NodeMemory::cuda(number_); }
  const std::string& name() const override { return name_; }
  CudaDriver::Function copy_kernel() const { return copy_; }
  CudaDriver::Function sum_kernel() const { return sum_; }
  /// Groups of threads that keep the device busy; each takes one tile after the other.
  unsigned groups(uint64_t tiles) const {
    constexpr uint64_t kForEachProcessor = 16;
    return static_cast<unsigned>(std::min<uint64_t>(tiles, processors_ * kForEachProcessor));
  }

  Result<Room> room() override {
    if (!is_used()) return Room{total_, total_};  // nobody has asked the driver more than that
    PTC_TRY(enter());
    size_t free = 0, total = 0;
    PTC_TRY(driver_.check(driver_.cuMemGetInfo(&free, &total), "cuMemGetInfo"));
    return Room{total, free};
  }

  Result<DeviceMemory> allocate(uint64_t bytes) override {
    PTC_TRY(enter());
    CudaDriver::Address address = 0;
    const CudaDriver::Result result =
        granularity_ > 0 && bytes >= kLeastShared
            ? allocate_shareable(bytes, address)
            : driver_.cuMemAlloc(&address, std::max<uint64_t>(bytes, 1));
    if (result == CudaDriver::kOutOfMemory) {
      PTC_TRY(const Room now, room());
      return make_error(Code::kNoSpace, "{} has {} of {} left, and {} are wanted",
                        memory().to_string(), format_size(now.free), format_size(now.bytes),
                        format_size(bytes));
    }
    PTC_TRY(driver_.check(result, "allocating memory"));
    return DeviceMemory(this, MemoryPointer(memory(), address), bytes);
  }

  const Id& id() const override { return id_; }

  Result<Shared> share(MemoryPointer begin) override {
    PTC_TRY(enter());
    Allocated found = {};
    {
      MutexLock lock(mutex_);
      const auto it = allocated_.find(begin.address());
      if (it != allocated_.end()) found = it->second;
    }
    if (begin.memory() != memory() || found.bytes == 0)
      return make_error(Code::kUnavailable, "memory of {} that other processes do not get",
                        memory().to_string());
    int descriptor = -1;
    PTC_TRY(driver_.check(driver_.cuMemExportToShareableHandle(&descriptor, found.allocation,
                                                               CudaDriver::kFileDescriptor, 0),
                          "cuMemExportToShareableHandle"));
    return Shared{UniqueFd(descriptor), found.bytes};
  }

  Result<RegisteredMemory> register_host(std::span<std::byte> bytes) override {
    if (bytes.empty()) return invalid_argument("no bytes can be registered");
    PTC_TRY(enter());
    const CudaDriver::Result result =
        driver_.cuMemHostRegister(bytes.data(), bytes.size(), CudaDriver::kPortable);
    if (result == CudaDriver::kAlreadyRegistered)
      return make_error(Code::kBusy, "some of these {} are registered with {} already",
                        format_size(bytes.size()), memory().to_string());
    PTC_TRY(driver_.check(result, "cuMemHostRegister"));
    return RegisteredMemory(this, bytes);
  }

  Result<std::unique_ptr<DeviceStream>> stream() override {
    PTC_TRY(enter());
    CudaDriver::Stream stream = nullptr;
    PTC_TRY(
        driver_.check(driver_.cuStreamCreate(&stream, CudaDriver::kNonBlocking), "cuStreamCreate"));
    return std::make_unique<CudaStream>(this, driver_, stream);
  }

 private:
  /// What processes share has 2 MiB of the device at least, so little memory is the driver's own,
  /// who puts many into as much: other processes copy it, and a thousand small files are not
  /// gigabytes.
  static constexpr uint64_t kLeastShared = 64 << 10;
  /// What is mapped at an address by this process, and may be by others.
  struct Allocated {
    CudaDriver::Allocation allocation = 0;
    uint64_t bytes = 0;
  };

  bool is_used() {
    MutexLock lock(begin_mutex_);
    return context_ != nullptr;
  }

  Result<> begin() PTC_REQUIRES(begin_mutex_) {
    CudaDriver::Context context = nullptr;
    PTC_TRY(driver_.check(driver_.cuDevicePrimaryCtxRetain(&context, device_),
                          "cuDevicePrimaryCtxRetain"));
    const auto load = [&]() -> Result<> {
      PTC_TRY(driver_.check(driver_.cuCtxSetCurrent(context), "cuCtxSetCurrent"));
      PTC_TRY(driver_.check(driver_.cuModuleLoadData(&module_, ptc_cuda_kernels), "the kernels"));
      PTC_TRY(driver_.check(driver_.cuModuleGetFunction(&copy_, module_, "ptc_copy"), "ptc_copy"));
      return driver_.check(driver_.cuModuleGetFunction(&sum_, module_, "ptc_sum"), "ptc_sum");
    };
    Result<> loaded = load();
    if (loaded.has_error()) {
      driver_.cuDevicePrimaryCtxRelease(device_);
      return loaded;
    }
    find_kind();
    context_ = context;
    return ok();
  }

  /// Sets granularity_, where memory can be shared.
  void find_kind() {
    const auto has = [this](int attribute) {
      int value = 0;
      return driver_.cuDeviceGetAttribute(&value, attribute, device_) == 0 && value != 0;
    };
    if (!has(CudaDriver::kManagesAddresses) || !has(CudaDriver::kSharesByDescriptor)) return;
    kind_.location.device = device_;
    kind_.for_rdma = has(CudaDriver::kRdmaOfAllocations) ? 1 : 0;
    size_t bytes = 0;
    constexpr int kMinimum = 0;
    if (driver_.cuMemGetAllocationGranularity(&bytes, &kind_, kMinimum) == 0) granularity_ = bytes;
  }

  CudaDriver::Result allocate_shareable(uint64_t wanted, CudaDriver::Address& address) {
    const uint64_t bytes =
        (std::max<uint64_t>(wanted, 1) + granularity_ - 1) / granularity_ * granularity_;
    CudaDriver::Allocation allocation = 0;
    CudaDriver::Result result = driver_.cuMemCreate(&allocation, bytes, &kind_, 0);
    if (result != 0) return result;
    result = driver_.cuMemAddressReserve(&address, bytes, 0, 0, 0);
    if (result == 0) {
      result = driver_.cuMemMap(address, bytes, 0, allocation, 0);
      if (result == 0) {
        const CudaDriver::Access access{kind_.location};
        result = driver_.cuMemSetAccess(address, bytes, &access, 1);
        if (result != 0) driver_.cuMemUnmap(address, bytes);
      }
      if (result != 0) driver_.cuMemAddressFree(address, bytes);
    }
    if (result != 0) {
      driver_.cuMemRelease(allocation);
      return result;
    }
    MutexLock lock(mutex_);
    allocated_[address] = {allocation, bytes};
    return 0;
  }

  void give_back(MemoryPointer begin) override {
    if (!enter()) return;
    Allocated found = {};
    {
      MutexLock lock(mutex_);
      const auto it = allocated_.find(begin.address());
      if (it != allocated_.end()) {
        found = it->second;
        allocated_.erase(it);
      }
    }
    if (found.bytes == 0) {
      driver_.cuMemFree(begin.address());
      return;
    }
    driver_.cuMemUnmap(begin.address(), found.bytes);
    driver_.cuMemAddressFree(begin.address(), found.bytes);
    driver_.cuMemRelease(found.allocation);
  }
  void end_registration(std::byte* begin) override {
    if (enter()) driver_.cuMemHostUnregister(begin);
  }

  const CudaDriver& driver_;
  const uint32_t number_;
  CudaDriver::Device device_ = 0;
  Mutex begin_mutex_;
  CudaDriver::Context context_ = nullptr;  // with it, until it is there; what follows comes with it
  CudaDriver::Module module_ = nullptr;
  CudaDriver::Function copy_ = nullptr, sum_ = nullptr;
  size_t total_ = 0;
  int processors_ = 0;
  std::string name_;
  Id id_ = {};
  CudaDriver::AllocationKind kind_;
  uint64_t granularity_ = 0;  // of memory that is shared; 0: none is
  Mutex mutex_;
  std::unordered_map<uintptr_t, Allocated> allocated_ PTC_GUARDED_BY(mutex_);
};

CudaStream::~CudaStream() {
  (void)wait();
  driver_.cuStreamDestroy(stream_);
}

Result<> CudaStream::begin() {
  if (failed_.has_error()) return Error(failed_.error());
  return device_->enter();
}

Result<> CudaStream::check(CudaDriver::Result result, std::string_view what) {
  if (result == 0) return ok();
  failed_ = driver_.check(result, what);
  return Error(failed_.error());
}

Result<uint64_t> CudaStream::of_device(NodeMemory memory, uintptr_t address) const {
  if (memory != device_->memory())
    return invalid_argument("bytes in {} are not in the memory of {}", memory.to_string(),
                            device_->memory().to_string());
  return uint64_t{address};
}

Result<> CudaStream::copy(MemoryPointer target, ConstMemoryPointer source, uint64_t bytes) {
  if (bytes == 0) return ok();
  for (const NodeMemory memory : {target.memory(), source.memory()})
    if (!memory.is_host()) {
      PTC_TRY(of_device(memory, 0));
    }
  PTC_TRY(begin());
  return check(driver_.cuMemcpyAsync(target.address(), source.address(), bytes, stream_),
               "cuMemcpyAsync");
}

Result<> CudaStream::zero(MemoryPointer begin_of, uint64_t bytes) {
  if (bytes == 0) return ok();
  PTC_TRY(of_device(begin_of.memory(), 0));
  PTC_TRY(begin());
  return check(driver_.cuMemsetD8Async(begin_of.address(), 0, bytes, stream_), "cuMemsetD8Async");
}

template <class... Table>
Result<std::array<CudaDriver::Address, sizeof...(Table)>> CudaStream::upload(
    const Table&... tables) {
  if (tasks_in_use_) {
    PTC_TRY(wait());
  }
  constexpr uint64_t kTableAlign = 16;
  uint64_t bytes = 0;
  ((bytes += (tables.size() * sizeof(tables[0]) + kTableAlign - 1) / kTableAlign * kTableAlign),
   ...);
  PTC_TRY(CudaDriver::Address at, tasks_.of(bytes));
  std::array<CudaDriver::Address, sizeof...(Table)> places{};
  size_t i = 0;
  Result<> copied = ok();
  const auto copy_one = [&](const auto& table) {
    places[i++] = at;
    const uint64_t size = table.size() * sizeof(table[0]);
    // Of memory that is not registered: it is read before this returns.
    if (copied.has_value() && size > 0)
      copied = check(driver_.cuMemcpyAsync(at, reinterpret_cast<CudaDriver::Address>(table.data()),
                                           size, stream_),
                     "the tasks of a launch");
    at += (size + kTableAlign - 1) / kTableAlign * kTableAlign;
  };
  (copy_one(tables), ...);
  PTC_TRY(std::move(copied));
  tasks_in_use_ = true;
  return places;
}

Result<> CudaStream::copy_strided(std::span<const DeviceCopy> copies) {
  CopyLaunch launch;
  for (size_t i = 0; i < copies.size(); ++i) {
    const auto& [source, target, copy] = copies[i];
    const auto from = of_device(source.memory(), source.address());
    const auto to = of_device(target.memory(), target.address());
    for (const auto* place : {&from, &to})
      if (place->has_error()) return Error(place->error()).with_context(fmt::format("copy {}", i));
    launch.add(from.value(), to.value(), copy);
  }
  if (launch.tiles() == 0) return ok();
  PTC_TRY(begin());
  PTC_TRY(auto places, upload(launch.tasks(), launch.levels()));
  uint64_t count = launch.tasks().size(), tiles = launch.tiles();
  void* parameters[] = {&places[0], &count, &places[1], &tiles};
  return check(driver_.cuLaunchKernel(device_->copy_kernel(), device_->groups(tiles), 1, 1,
                                      kernels::kThreads, 1, 1, 0, stream_, parameters, nullptr),
               "launching ptc_copy");
}

Result<> CudaStream::add_checksums(std::span<const DeviceRun> runs, std::span<Checksum> sums) {
  SumLaunch launch;
  for (size_t i = 0; i < runs.size(); ++i) {
    const DeviceRun& run = runs[i];
    if (run.sum >= sums.size()) return invalid_argument("run {}: there is no sum {}", i, run.sum);
    const auto bytes = of_device(run.bytes.memory(), run.bytes.address());
    if (bytes.has_error()) return Error(bytes.error()).with_context(fmt::format("run {}", i));
    launch.add(bytes.value(), run.count, run.logical_offset, run.sum);
  }
  if (launch.tiles() == 0) return ok();
  PTC_TRY(begin());
  if (sums_ != nullptr) {
    PTC_TRY(wait());
  }
  PTC_TRY(auto places, upload(launch.tasks()));
  const uint64_t bytes = sums.size() * sizeof(Checksum);
  PTC_TRY(CudaDriver::Address found, results_.of(bytes));
  PTC_TRY(check(driver_.cuMemsetD8Async(found, 0, bytes, stream_), "cuMemsetD8Async"));
  uint64_t count = launch.tasks().size(), tiles = launch.tiles();
  void* parameters[] = {&places[0], &count, &found, &tiles};
  PTC_TRY(check(driver_.cuLaunchKernel(device_->sum_kernel(), device_->groups(tiles), 1, 1,
                                       kernels::kThreads, 1, 1, 0, stream_, parameters, nullptr),
                "launching ptc_sum"));
  sums_ = std::make_unique<Sums>(Sums{sums, std::vector<Checksum>(sums.size())});
  return check(driver_.cuMemcpyAsync(reinterpret_cast<CudaDriver::Address>(sums_->found.data()),
                                     found, bytes, stream_),
               "cuMemcpyAsync");
}

Result<> CudaStream::wait() {
  PTC_TRY(begin());
  PTC_TRY(check(driver_.cuStreamSynchronize(stream_), "cuStreamSynchronize"));
  tasks_in_use_ = false;
  if (const auto sums = std::exchange(sums_, nullptr))
    for (size_t i = 0; i < sums->found.size(); ++i) sums->to[i] += sums->found[i];
  return ok();
}

}  // namespace

uint32_t cuda_device_count() {
  const auto driver = CudaDriver::load();
  int count = 0;
  if (!driver || driver.value()->cuDeviceGetCount(&count) != 0) return 0;
  return static_cast<uint32_t>(std::max(count, 0));
}

bool has_cuda_kernels() { return ptc_cuda_kernels_bytes > 0; }

Result<std::unique_ptr<Device>> open_cuda_device(uint32_t number) {
  if (!has_cuda_kernels())
    return make_error(Code::kUnavailable,
                      "this program was built without CUDA: build it where nvcc is, with "
                      "-DPTC_CUDA=ON");
  PTC_TRY(const CudaDriver* const driver, CudaDriver::load());
  if (const uint32_t count = cuda_device_count(); number >= count)
    return make_error(Code::kUnavailable, "there is no {}: {} devices are here",
                      NodeMemory::cuda(number).to_string(), count);
  auto device = std::make_unique<CudaDevice>(*driver, number);
  PTC_TRY(device->open());
  return std::unique_ptr<Device>(std::move(device));
}

}  // namespace ptc
