#include "tools/capabilities.h"

#include <linux/capability.h>
#include <spdlog/spdlog.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <iterator>

namespace ptc {
namespace {

constexpr NeededCapability kNeeded[] = {
    {CAP_SYS_ADMIN, "CAP_SYS_ADMIN",
     "the kernel does not read images by itself, and fusermount3 must mount"},
    {CAP_CHOWN, "CAP_CHOWN", "files cannot be given to who makes them"},
    {CAP_DAC_OVERRIDE, "CAP_DAC_OVERRIDE", "files of other users cannot be written, nor committed"},
    {CAP_DAC_READ_SEARCH, "CAP_DAC_READ_SEARCH", "files of other users cannot be read"},
    {CAP_FOWNER, "CAP_FOWNER", "modes and times of other users' files cannot be changed"},
    {CAP_FSETID, "CAP_FSETID", "set-group-id bits of other users' files are lost"},
    {CAP_SETUID, "CAP_SETUID", "shards of a data set cannot be read as the user who named them"},
    {CAP_SETGID, "CAP_SETGID", "shards of a data set cannot be read as the user who named them"},
    {CAP_LEASE, "CAP_LEASE",
     "it cannot be known whether another user's file is still mapped when it is committed"},
    {CAP_LINUX_IMMUTABLE, "CAP_LINUX_IMMUTABLE",
     "root can write into the directory beneath the mount while nothing is mounted"},
    {CAP_NET_BIND_SERVICE, "CAP_NET_BIND_SERVICE", "ports below 1024 cannot be had"},
};
constexpr int kMostCapabilities = 64;

bool is_needed(int capability) {
  return std::any_of(std::begin(kNeeded), std::end(kNeeded),
                     [&](const NeededCapability& needed) { return needed.number == capability; });
}

uint64_t bit(int capability) { return uint64_t{1} << capability; }

}  // namespace

std::span<const NeededCapability> needed_capabilities() { return kNeeded; }

void keep_needed_capabilities() {
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct data[2] = {};
  if (::syscall(SYS_capget, &header, data) != 0) return;
  const uint64_t permitted = data[0].permitted | uint64_t{data[1].permitted} << 32;
  uint64_t kept = 0;
  for (const NeededCapability& needed : kNeeded) {
    if (needed.is_in(permitted)) {
      kept |= bit(needed.number);
    } else if (::geteuid() == 0) {
      spdlog::warn("{} is missing: {}", needed.name, needed.without);
    }
  }
  // Of what is started, too: a root that is executed has what is left of this set.
  for (int capability = 0; capability < kMostCapabilities; ++capability)
    if (!is_needed(capability)) (void)::prctl(PR_CAPBSET_DROP, capability, 0, 0, 0);
  (void)::prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
  for (int half = 0; half < 2; ++half) {
    data[half].permitted = data[half].effective = static_cast<uint32_t>(kept >> (32 * half));
    data[half].inheritable = 0;
  }
  if (::syscall(SYS_capset, &header, data) != 0)
    spdlog::warn("capabilities that are not needed could not be given up: {}",
                 std::strerror(errno));
}

}  // namespace ptc
