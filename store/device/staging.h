// Between a device's memory and the host's, by a few buffers of fixed size.
//
// What goes is packed: the device gathers or spreads it in one launch, and one copy of registered
// memory goes over the link, whatever the runs are.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "store/base/error.h"
#include "store/base/memory_place.h"
#include "store/base/mutex.h"
#include "store/device/device.h"
#include "store/tensor/packed_copy.h"

namespace ptc {

/// The runs of a copy that fall into the target window [begin, end).
struct StagedPart {
  StridedCopy copy;
  uint64_t begin = 0, end = 0;
  MemoryPointer base = {};  // from which the copy's offsets on the device's side count

  uint64_t bytes() const { return bytes_between(copy, begin, end); }
};

/// Two lanes of a device, made when they are first wanted: each 4 MiB of its memory, as much of the
/// host's, and a stream. Threads: any. Ends before its device.
class Staging {
 public:
  static constexpr uint64_t kBytes = 4 << 20;
  static constexpr size_t kLanes = 2;

  class Buffers {
   public:
    static Result<std::unique_ptr<Buffers>> make(Device& device);

    /// kBytes.
    std::span<std::byte> host() { return {host_.get(), kBytes}; }
    /// The bytes of the parts, one part behind the other, kBytes at most, out of the device's
    /// memory: the offsets of their sources count from `base`. To `to`, or host(); there when it
    /// returns.
    Result<> down(std::span<const StagedPart> parts, std::byte* to = nullptr);
    /// Such bytes from `from`, or host(), to the parts' targets in the device's memory.
    Result<> up(std::span<const StagedPart> parts, const std::byte* from = nullptr);
    /// What a DeviceStream does, done when they return.
    Result<> within(std::span<const DeviceCopy> copies);
    Result<> zero(MemoryPointer begin, uint64_t bytes);
    Result<> add_checksums(std::span<const DeviceRun> runs, std::span<Checksum> sums);
    bool failed() const { return failed_; }

   private:
    struct Free {
      void operator()(std::byte* memory) const;
    };
    template <class Work>
    Result<> run(Work work);

    std::unique_ptr<std::byte, Free> host_;
    RegisteredMemory registered_;  // or none: then the driver copies once more
    DeviceMemory memory_;
    std::unique_ptr<DeviceStream> stream_;
    bool failed_ = false;
  };

  /// A lane that is nobody else's, until the object goes. What failed in it is not used again.
  class Lane {
   public:
    Lane(Staging* staging, std::unique_ptr<Buffers> buffers)
        : staging_(staging), buffers_(std::move(buffers)) {}
    Lane(Lane&& other) noexcept = default;
    ~Lane() {
      if (buffers_ != nullptr) staging_->give_back(std::move(buffers_));
    }
    Buffers* operator->() { return buffers_.get(); }

   private:
    Staging* staging_;
    std::unique_ptr<Buffers> buffers_;
  };

  explicit Staging(Device& device) : device_(device) {}
  /// Waits for one. kNoSpace: the device has no room for it.
  Result<Lane> take();
  /// What lanes that are not made yet will have of the device's memory.
  uint64_t still_to_take();

 private:
  void give_back(std::unique_ptr<Buffers> buffers);

  Device& device_;
  Mutex mutex_;
  ConditionVariable more_;
  std::vector<std::unique_ptr<Buffers>> free_ PTC_GUARDED_BY(mutex_);
  size_t taken_ PTC_GUARDED_BY(mutex_) = 0;
  size_t made_ PTC_GUARDED_BY(mutex_) = 0;
};

}  // namespace ptc
