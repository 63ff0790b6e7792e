#include "store/device/host_device.h"

#include <fmt/format.h>

#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "store/base/size_text.h"
#include "store/device/launch.h"

namespace ptc {
namespace {

// No processor has such addresses: whoever follows one dies of it.
constexpr uintptr_t kFirstAddress = uintptr_t{0x5a} << 56;
constexpr uint64_t kAlign = 256;  // as a device's own
constexpr int kPoison = 0xa5;

}  // namespace

/// Keeps what it is told until somebody waits.
class HostStream final : public DeviceStream {
 public:
  explicit HostStream(HostDevice* device) : device_(device) {}
  ~HostStream() override { (void)wait(); }

  Result<> copy(MemoryPointer target, ConstMemoryPointer source, uint64_t bytes) override {
    if (bytes == 0) return ok();
    PTC_TRY(std::byte* const to, find(target.memory(), target.address(), bytes));
    PTC_TRY(const std::byte* const from, find(source.memory(), source.address(), bytes));
    work_.push_back([=] { std::memmove(to, from, bytes); });
    return ok();
  }

  Result<> zero(MemoryPointer begin, uint64_t bytes) override {
    if (bytes == 0) return ok();
    PTC_TRY(std::byte* const at, device_->find(begin.memory(), begin.address(), bytes));
    work_.push_back([=] { std::memset(at, 0, bytes); });
    return ok();
  }

  Result<> copy_strided(std::span<const DeviceCopy> copies) override {
    CopyLaunch launch;
    for (size_t i = 0; i < copies.size(); ++i) {
      const auto& [source, target, copy] = copies[i];
      if (copy.total_bytes() == 0) continue;
      const auto from = of_device(source, copy.source_offset, copy.source_end());
      const auto to = of_device(target, copy.target_offset, copy.target_end());
      for (const auto* place : {&from, &to})
        if (place->has_error())
          return Error(place->error()).with_context(fmt::format("copy {}", i));
      launch.add(from.value() - copy.source_offset, to.value() - copy.target_offset, copy);
    }
    work_.push_back([launch = std::move(launch)] {
      const std::vector<kernels::CopyTask>& tasks = launch.tasks();
      for (uint64_t tile = launch.tiles(); tile-- > 0;)  // in no order that anybody may count on
        for (uint32_t thread = 0; thread < kernels::kThreads; ++thread)
          kernels::copy_tile(tasks[kernels::task_of(tasks.data(), tasks.size(), tile)],
                             launch.levels().data(), tile, thread);
    });
    return ok();
  }

  Result<> add_checksums(std::span<const DeviceRun> runs, std::span<Checksum> sums) override {
    SumLaunch launch;
    for (size_t i = 0; i < runs.size(); ++i) {
      const DeviceRun& run = runs[i];
      if (run.sum >= sums.size()) return invalid_argument("run {}: there is no sum {}", i, run.sum);
      if (run.count == 0) continue;
      const auto bytes = of_device(run.bytes, 0, run.count);
      if (bytes.has_error()) return Error(bytes.error()).with_context(fmt::format("run {}", i));
      launch.add(bytes.value(), run.count, run.logical_offset, run.sum);
    }
    work_.push_back([launch = std::move(launch), sums] {
      const std::vector<kernels::SumTask>& tasks = launch.tasks();
      for (uint64_t tile = launch.tiles(); tile-- > 0;) {
        const kernels::SumTask& task = tasks[kernels::task_of(tasks.data(), tasks.size(), tile)];
        for (uint32_t thread = 0; thread < kernels::kThreads; ++thread) {
          const kernels::ThreadSum sum = kernels::sum_tile(task, tile, thread);
          sums[task.sum] += Checksum{{sum.lane[0], sum.lane[1]}};
        }
      }
    });
    return ok();
  }

  Result<> wait() override {
    for (const auto& one : std::exchange(work_, {})) one();
    return ok();
  }

 private:
  Result<std::byte*> find(NodeMemory memory, uintptr_t address, uint64_t bytes) const {
    if (memory.is_host()) return reinterpret_cast<std::byte*>(address);
    return device_->find(memory, address, bytes);
  }
  /// Where the processor has the bytes [begin, end) behind a pointer into the device's memory.
  template <class Pointer>
  Result<uint64_t> of_device(const Pointer& pointer, uint64_t begin, uint64_t end) const {
    PTC_TRY(std::byte* const at,
            device_->find(pointer.memory(), pointer.address() + begin, end - begin));
    return reinterpret_cast<uint64_t>(at);
  }

  HostDevice* const device_;
  std::vector<std::function<void()>> work_;
};

HostDevice::HostDevice() : HostDevice(Options{}) {}
HostDevice::HostDevice(const Options& options)
    : memory_(NodeMemory::cuda(options.number)),
      name_("the host's memory"),
      options_(options),
      next_address_(kFirstAddress) {}
HostDevice::~HostDevice() = default;

Result<Device::Room> HostDevice::room() {
  MutexLock lock(mutex_);
  return Room{options_.memory_bytes, options_.memory_bytes - used_};
}

Result<DeviceMemory> HostDevice::allocate(uint64_t bytes) {
  MutexLock lock(mutex_);
  if (bytes > options_.memory_bytes - used_)
    return make_error(Code::kNoSpace, "{} has {} of {} left, and {} are wanted",
                      memory_.to_string(), format_size(options_.memory_bytes - used_),
                      format_size(options_.memory_bytes), format_size(bytes));
  // The next begins far behind it: what lies between is nobody's.
  const uintptr_t address = next_address_;
  next_address_ += (bytes / kAlign + 2) * kAlign;
  // Aligned as the address is, so that lanes are as wide as on a device.
  auto memory = std::make_unique<std::byte[]>(bytes + kAlign);
  std::memset(memory.get(), kPoison, bytes + kAlign);
  allocations_.emplace(address, Allocation{bytes, std::move(memory)});
  used_ += bytes;
  return DeviceMemory(this, MemoryPointer(memory_, address), bytes);
}

void HostDevice::give_back(MemoryPointer begin) {
  MutexLock lock(mutex_);
  const auto found = allocations_.find(begin.address());
  PTC_CHECK(found != allocations_.end());
  used_ -= found->second.bytes;
  allocations_.erase(found);
}

Result<std::byte*> HostDevice::find(NodeMemory memory, uintptr_t address, uint64_t bytes) const {
  if (memory != memory_)
    return invalid_argument("{} bytes in {} are not in the memory of {}", bytes, memory.to_string(),
                            memory_.to_string());
  MutexLock lock(mutex_);
  auto next = allocations_.upper_bound(address);
  if (next == allocations_.begin())
    return invalid_argument("{} has nothing at {:#x}", memory_.to_string(), address);
  const auto& [begin, allocation] = *--next;
  const uint64_t offset = address - begin;
  if (offset > allocation.bytes || bytes > allocation.bytes - offset)
    return invalid_argument("bytes {} to {} are not in the {} allocated at {:#x} in {}", offset,
                            offset + bytes, allocation.bytes, begin, memory_.to_string());
  const auto at = reinterpret_cast<uintptr_t>(allocation.memory.get());
  return allocation.memory.get() + (kAlign - at % kAlign) % kAlign + offset;
}

Result<RegisteredMemory> HostDevice::register_host(std::span<std::byte> bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(bytes.data());
  if (bytes.empty()) return invalid_argument("no bytes can be registered");
  MutexLock lock(mutex_);
  const auto next = registered_.lower_bound(begin + bytes.size());
  if (next != registered_.begin()) {
    const auto& [other, count] = *std::prev(next);
    if (other + count > begin)
      return make_error(Code::kBusy, "{} of the host's bytes are registered with {} already",
                        std::min(begin + bytes.size(), other + count) - std::max(begin, other),
                        memory_.to_string());
  }
  if (bytes.size() > options_.registrable_bytes - registered_bytes_)
    return make_error(Code::kUnavailable, "{} registers {} of the host's memory at most",
                      memory_.to_string(), format_size(options_.registrable_bytes));
  registered_.emplace(begin, bytes.size());
  registered_bytes_ += bytes.size();
  return RegisteredMemory(this, bytes);
}

void HostDevice::end_registration(std::byte* begin) {
  MutexLock lock(mutex_);
  const auto found = registered_.find(reinterpret_cast<uintptr_t>(begin));
  PTC_CHECK(found != registered_.end());
  registered_bytes_ -= found->second;
  registered_.erase(found);
}

Result<std::unique_ptr<DeviceStream>> HostDevice::stream() {
  return std::make_unique<HostStream>(this);
}

}  // namespace ptc
