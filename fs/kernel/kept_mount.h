// A mount that goes on when the process that serves it is another one.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>

#include "fs/tree/live_state.h"
#include "store/base/error.h"

struct iovec;

namespace ptc {

/// Of one FuseSession: its /dev/fuse, which a keeper has open, too, and what the kernel said when
/// it greeted. A later process hears the same greeting from here, gives the same answer to it, and
/// then asks the kernel for what the earlier one has read and not answered. Threads: one, until the
/// greeting is answered.
class KeptMount {
 public:
  /// Both outlive it.
  KeptMount(int device, LiveState& state) : device_(device), state_(state) {}

  /// Called once, by any thread: from here on there is a mount that a later process can go on with.
  /// No request of a user has been read yet.
  void set_begins(std::function<void()> begins) { begins_ = std::move(begins); }
  void begin() const {
    if (begins_) begins_();
  }

  int device() const { return device_; }
  LiveState& state() { return state_; }
  bool goes_on() const { return state_.goes_on(); }

  /// Mounts. kUnavailable, and why. Needs root.
  Result<> mount(const std::string& mount_point, const std::string& source,
                 const std::string& options, bool allow_other, unsigned long flags);

  /// What is read first is the greeting, where an earlier process has heard it.
  bool has_greeting() const { return goes_on() && !heard_; }
  ssize_t read_greeting(void* buffer, size_t size);
  void save_greeting(std::span<const std::byte> request);
  /// The answer to it, which the kernel is sent (true), or has got from an earlier process. Then it
  /// must be the same: agreed() says so.
  bool answers_greeting(const iovec* iov, int count);
  const Result<>& agreed() const { return agreed_; }

  /// Whether the kernel gives out once more what was not answered (Linux 6.9).
  bool can_resend() const;
  Result<> resend();

 private:
  const int device_;
  LiveState& state_;
  std::function<void()> begins_;
  bool heard_ = false;
  Result<> agreed_ = ok();
};

}  // namespace ptc
