#include "store/device/staging.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>

namespace ptc {
namespace {

/// Of each part its rectangles, with the place of each in the string of all bytes.
template <class Visit>
void for_each_staged(std::span<const StagedPart> parts, Visit visit) {
  uint64_t at = 0;
  for (const StagedPart& part : parts)
    for_each_rectangle(part.copy, part.begin, part.end, [&](const StridedCopy& rectangle) {
      visit(part, rectangle, at);
      at += rectangle.total_bytes();
    });
}

uint64_t staged_bytes(std::span<const StagedPart> parts) {
  uint64_t bytes = 0;
  for (const StagedPart& part : parts) bytes += part.bytes();
  return bytes;
}

ConstMemoryPointer read_only(MemoryPointer pointer) {
  return {pointer.memory(), pointer.address()};
}

}  // namespace

void Staging::Buffers::Free::operator()(std::byte* memory) const { ::munmap(memory, kBytes); }

Result<std::unique_ptr<Staging::Buffers>> Staging::Buffers::make(Device& device) {
  auto buffers = std::make_unique<Buffers>();
  void* const mapped =
      ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return errno_error(errno, "memory for a device's lane");
  buffers->host_.reset(static_cast<std::byte*>(mapped));
  if (auto registered = device.register_host(buffers->host()); registered.has_value())
    buffers->registered_ = std::move(registered).value();
  PTC_TRY(buffers->memory_, device.allocate(kBytes));
  PTC_TRY(buffers->stream_, device.stream());
  return buffers;
}

template <class Work>
Result<> Staging::Buffers::run(Work work) {
  Result<> done = work();
  // Also after an error: what was begun uses memory that the caller may let go of.
  Result<> waited = stream_->wait();
  if (done.has_value()) done = std::move(waited);
  failed_ |= done.has_error();
  return done;
}

Result<> Staging::Buffers::down(std::span<const StagedPart> parts, std::byte* to) {
  const uint64_t bytes = staged_bytes(parts);
  PTC_CHECK(bytes <= kBytes);
  return run([&]() -> Result<> {
    std::vector<DeviceCopy> copies;
    for_each_staged(parts, [&](const StagedPart& part, const StridedCopy& rectangle, uint64_t at) {
      StridedCopy gathered = packed(rectangle);
      gathered.target_offset = at;
      copies.push_back({read_only(part.base), memory_.begin(), gathered});
    });
    PTC_TRY(stream_->copy_strided(copies));
    return stream_->copy(in_host_memory(to != nullptr ? to : host_.get()),
                         read_only(memory_.begin()), bytes);
  });
}

Result<> Staging::Buffers::up(std::span<const StagedPart> parts, const std::byte* from) {
  const uint64_t bytes = staged_bytes(parts);
  PTC_CHECK(bytes <= kBytes);
  return run([&]() -> Result<> {
    PTC_TRY(stream_->copy(memory_.begin(), in_host_memory(from != nullptr ? from : host_.get()),
                          bytes));
    std::vector<DeviceCopy> copies;
    for_each_staged(parts, [&](const StagedPart& part, const StridedCopy& rectangle, uint64_t at) {
      StridedCopy spread = rectangle;
      const StridedCopy string = packed(rectangle);
      spread.source_offset = at;
      for (uint32_t level = 0; level < spread.level_count; ++level)
        spread.levels[level].source_stride = string.levels[level].target_stride;
      copies.push_back({read_only(memory_.begin()), part.base, spread});
    });
    return stream_->copy_strided(copies);
  });
}

Result<> Staging::Buffers::within(std::span<const DeviceCopy> copies) {
  return run([&] { return stream_->copy_strided(copies); });
}

Result<> Staging::Buffers::zero(MemoryPointer begin, uint64_t bytes) {
  return run([&] { return stream_->zero(begin, bytes); });
}

Result<> Staging::Buffers::add_checksums(std::span<const DeviceRun> runs,
                                         std::span<Checksum> sums) {
  return run([&] { return stream_->add_checksums(runs, sums); });
}

Result<Staging::Lane> Staging::take() {
  std::unique_ptr<Buffers> buffers;
  {
    UniqueLock lock(mutex_);
    more_.wait(mutex_, [&]() PTC_REQUIRES(mutex_) { return taken_ < kLanes; });
    ++taken_;
    if (!free_.empty()) {
      buffers = std::move(free_.back());
      free_.pop_back();
    }
  }
  if (buffers == nullptr) {
    auto made = Buffers::make(device_);
    if (made.has_error()) {
      give_back(nullptr);
      return std::move(made).error();
    }
    buffers = std::move(made).value();
    MutexLock lock(mutex_);
    ++made_;
  }
  return Lane(this, std::move(buffers));
}

uint64_t Staging::still_to_take() {
  MutexLock lock(mutex_);
  return (kLanes - std::min(made_, kLanes)) * kBytes;
}

void Staging::give_back(std::unique_ptr<Buffers> buffers) {
  const bool failed = buffers != nullptr && buffers->failed();
  if (failed) buffers.reset();
  MutexLock lock(mutex_);
  if (failed) --made_;
  --taken_;
  if (buffers != nullptr) free_.push_back(std::move(buffers));
  more_.notify_one();
}

}  // namespace ptc
