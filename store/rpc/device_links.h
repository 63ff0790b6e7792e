// The links between the devices of this node and those of others (store/device/device_link.h): few,
// each kept for some seconds for the next fetch between the same two devices.
//
// A link is asked for by the node whose device receives, and used by one fetch at a time. It has
// two staging buffers on its own device: what is gathered into the one goes out while the other is
// filled. Those that others asked for are counted apart, so that two nodes that ask each other for
// bytes never wait for each other's links.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <stop_token>
#include <string>
#include <thread>

#include "store/base/error.h"
#include "store/base/mutex.h"
#include "store/device/device_link.h"
#include "store/device/devices.h"

namespace ptc {

struct DeviceLinksOptions {
  uint64_t chunk_bytes = 8 << 20;  // of a staging buffer; kLeastChunkBytes to kMostChunkBytes
  size_t most = 8;  // links of a device that this node asked for, and as many that others did
  std::chrono::milliseconds connect{20'000};  // until a link is made
  std::chrono::milliseconds silence{10'000};  // until one over which nothing goes counts as dead
  std::chrono::milliseconds unused{10'000};   // until one that nobody uses ends, or a little more
};

/// A link, and what this end of it needs. Threads: one at a time; link->abort(): any.
struct StagedLink {
  static constexpr size_t kBuffers = 2;

  std::string node;        // of the other end
  NodeMemory here, there;  // the two devices; `there` of a link that this node asked for
  uint64_t number = 0;     // of who asked for it
  std::string id;          // it is not connected yet, and this makes it
  Device* device = nullptr;
  /// Of the link, too, as a device may be at it when all others are done with it.
  std::shared_ptr<const std::array<DeviceMemory, kBuffers>> staging;
  std::unique_ptr<DeviceStream> stream;
  std::unique_ptr<DeviceLink> link;  // null: not made yet. Ends first
  DeviceLink::Deadline used;         // of one that is kept: last
};

/// Links of one direction. Threads: any.
class LinkTable {
 public:
  explicit LinkTable(size_t most) : most_(most) {}

  /// Gives its place back, too.
  struct Drop {
    LinkTable* table;
    void operator()(StagedLink* link) const;
  };
  using Held = std::unique_ptr<StagedLink, Drop>;

  /// One that nobody uses, or null.
  template <class Fits>
  Held take(Fits fits) PTC_EXCLUDES(mutex_);
  /// A place for a further one of the device `here`, empty; where there is none, that of the one
  /// that nobody has used for longest, which ends. Null: all are in use.
  Held make_place(NodeMemory here) PTC_EXCLUDES(mutex_);
  /// Until one of the device is no more in use. False: not in this time.
  bool wait_for_one(NodeMemory here, DeviceLink::Deadline deadline, const std::stop_token& stop)
      PTC_EXCLUDES(mutex_);
  /// For the next one that wants it; it is good.
  void keep(Held link) PTC_EXCLUDES(mutex_);
  /// Those that nobody has used since then end.
  void end_unused(DeviceLink::Deadline since) PTC_EXCLUDES(mutex_);
  bool keeps_any() const PTC_EXCLUDES(mutex_);
  size_t count() const PTC_EXCLUDES(mutex_);  // in use or kept

 private:
  void one_less(NodeMemory here) PTC_EXCLUDES(mutex_);

  const size_t most_;  // of each device
  mutable Mutex mutex_;
  StoppableConditionVariable changed_;
  std::list<std::unique_ptr<StagedLink>> kept_ PTC_GUARDED_BY(mutex_);  // used last: at the end
  std::map<NodeMemory, size_t> in_use_ PTC_GUARDED_BY(mutex_);
};

/// Threads: any. Outlives what it gave.
class DeviceLinks {
 public:
  using Held = LinkTable::Held;

  /// Called when links are first wanted, once: it takes a while, and memory.
  using FindMaker = std::function<Result<std::unique_ptr<DeviceLinkMaker>>()>;
  DeviceLinks(std::shared_ptr<const Devices> devices, FindMaker find_maker,
              const DeviceLinksOptions& options = {});

  const Devices& devices() const { return *devices_; }
  /// Whose links they are; both ends must have one of the same name. The error of FindMaker.
  Result<DeviceLinkMaker*> maker();
  const DeviceLinksOptions& options() const { return options_; }

  /// A link from a device of `node` to one here: one that is kept, else one that is not made
  /// yet. Where as many are in use as may be, one of these is waited for. kUnavailable: not until
  /// the deadline; kNoSpace: for staging; kCancelled.
  Result<Held> ask(const std::string& node, NodeMemory there, NodeMemory here,
                   DeviceLink::Deadline deadline, std::stop_token stop);
  /// Makes it, or makes it anew, to be connected. Not before the node has said that it has none of
  /// that number and would take one: an id that nobody uses costs NCCL a thread for good.
  Result<> make(StagedLink& link);
  /// The other end of one that `node` asked for under that number. With an id it is a new one.
  /// kConflict: no link of that number is kept here, or another fetch uses it: the node is to make
  /// a new one. too_busy(): as many are in use as may be. kInvalidArgument: no such device.
  Result<Held> answer(const std::string& node, NodeMemory here, uint64_t number,
                      const std::string& id);
  /// After a fetch that went well.
  void keep(Held link);

  size_t asked() const { return asked_.count(); }
  size_t answered() const { return answered_.count(); }

 private:
  Result<> add_staging(StagedLink& link);
  void end_unused(const std::stop_token& stop) PTC_EXCLUDES(mutex_);

  const std::shared_ptr<const Devices> devices_;
  const FindMaker find_maker_;
  std::once_flag found_;
  Result<std::unique_ptr<DeviceLinkMaker>> maker_ = std::unique_ptr<DeviceLinkMaker>();
  const DeviceLinksOptions options_;
  std::atomic<uint64_t> next_number_;
  LinkTable asked_, answered_;
  Mutex making_room_;  // before all others
  Mutex mutex_;
  StoppableConditionVariable kept_;
  bool any_kept_ PTC_GUARDED_BY(mutex_) = false;     // since ends_unused_ looked
  std::jthread ends_unused_ PTC_GUARDED_BY(mutex_);  // from the first that is kept on; ends first
};

}  // namespace ptc
