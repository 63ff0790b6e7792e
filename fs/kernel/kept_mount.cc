#include "fs/kernel/kept_mount.h"

#include <fmt/format.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace ptc {
namespace {

// The kernel's wire format.
struct GreetingIn {
  uint32_t length, opcode;
  uint64_t unique, nodeid;
  uint32_t uid, gid, pid, padding;
  uint32_t major, minor, max_readahead, flags, flags2;
};
struct GreetingOut {
  uint32_t length;
  int32_t error;
  uint64_t unique;
  uint32_t major, minor, max_readahead, flags;
  uint16_t max_background, congestion_threshold;
  uint32_t max_write, time_gran;
  uint16_t max_pages, map_alignment;
  uint32_t flags2, max_stack_depth;
};
struct Notification {
  uint32_t length;
  int32_t code;
  uint64_t unique;
};
constexpr int32_t kNotifyResend = 7;
constexpr uint32_t kHasResend = 1u << (39 - 32);

}  // namespace

Result<> KeptMount::mount(const std::string& mount_point, const std::string& source,
                          const std::string& options, bool allow_other, unsigned long flags) {
  std::string data = fmt::format("fd={},rootmode=40000,user_id={},group_id={},{}", device_,
                                 ::geteuid(), ::getegid(), options);
  if (allow_other) data += ",allow_other";
  if (::mount(source.c_str(), mount_point.c_str(), "fuse.ptcfs", flags | MS_NOSUID | MS_NODEV,
              data.c_str()) == 0)
    return ok();
  return make_error(Code::kUnavailable, "mounting {} failed: {}", mount_point,
                    std::strerror(errno));
}

ssize_t KeptMount::read_greeting(void* buffer, size_t size) {
  LiveState::Header& header = state_.header();
  heard_ = true;
  const size_t bytes = std::min<size_t>(header.init_request_bytes, header.init_request.size());
  if (size < bytes) {
    errno = EINVAL;
    return -1;
  }
  std::memcpy(buffer, header.init_request.data(), bytes);
  return static_cast<ssize_t>(bytes);
}

void KeptMount::save_greeting(std::span<const std::byte> request) {
  if (goes_on()) return;
  LiveState::Header& header = state_.header();
  const size_t bytes = std::min(request.size(), header.init_request.size());
  std::copy_n(request.begin(), bytes, header.init_request.begin());
  header.init_request_bytes = static_cast<uint32_t>(bytes);
}

bool KeptMount::answers_greeting(const iovec* iov, int count) {
  LiveState::Header& header = state_.header();
  std::array<std::byte, sizeof header.init_reply> answer = {};
  size_t bytes = 0;
  for (int i = 0; i < count; ++i) {
    const size_t more = std::min(iov[i].iov_len, answer.size() - bytes);
    std::memcpy(answer.data() + bytes, iov[i].iov_base, more);
    bytes += more;
  }
  if (!goes_on()) {
    header.init_reply = answer;
    header.init_reply_bytes = static_cast<uint32_t>(bytes);
    header.mounted = 1;
    return true;
  }
  GreetingOut now = {}, then = {};
  GreetingIn heard = {};
  std::memcpy(&now, answer.data(), sizeof now);
  std::memcpy(&heard, header.init_request.data(), sizeof heard);
  if (now.unique != heard.unique) return true;  // the kernel has not got the former one
  std::memcpy(&then, header.init_reply.data(), sizeof then);
  // What the kernel was told once stays so.
  const bool same = now.minor == then.minor && now.flags == then.flags &&
                    now.flags2 == then.flags2 && now.max_write == then.max_write &&
                    now.max_pages == then.max_pages &&
                    now.max_stack_depth == then.max_stack_depth && now.time_gran == then.time_gran;
  if (!same) {
    agreed_ = make_error(Code::kInvalidArgument,
                         "the mount was made by a daemon that agreed on other things with the "
                         "kernel (flags {:x}.{:x}, now {:x}.{:x}); unmount it, and mount again",
                         then.flags2, then.flags, now.flags2, now.flags);
  }
  return false;
}

bool KeptMount::can_resend() const {
  const LiveState::Header& header = state_.header();
  GreetingIn greeting = {};
  if (header.init_request_bytes < sizeof greeting) return false;
  std::memcpy(&greeting, header.init_request.data(), sizeof greeting);
  return (greeting.flags2 & kHasResend) != 0;
}

Result<> KeptMount::resend() {
  if (!can_resend()) return ok();
  const Notification resend = {sizeof resend, kNotifyResend, 0};
  if (::write(device_, &resend, sizeof resend) == sizeof resend) return ok();
  return errno_error(errno, "asking the kernel for what was not answered");
}

}  // namespace ptc
