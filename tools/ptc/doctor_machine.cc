// What `ptc doctor` says of one machine and its daemon.
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "store/base/shell_word.h"
#include "store/base/size_text.h"
#include "tools/capabilities.h"
#include "tools/ptc/doctor_checks.h"

namespace ptc::cli {
namespace {

// What of the kernel fs/kernel uses, and since which Linux it is there.
struct Since {
  unsigned major, minor;
  friend auto operator<=>(const Since&, const Since&) = default;
};
constexpr Since kPassthroughSince{6, 9}, kUringSince{6, 14}, kEpochSince{6, 16}, kPruneSince{6, 18};

constexpr uint64_t kFewFiles = 65536, kTooFewFiles = 1024;
constexpr uint64_t kFewThreads = 512;
constexpr uint64_t kUsualMappings = 65530;
constexpr uint64_t kSwapThatCounts = 64 << 20;

/// {0, 0}: it cannot be told.
Since linux_of(const std::string& release) {
  Since version{0, 0};
  if (std::sscanf(release.c_str(), "%u.%u", &version.major, &version.minor) != 2) return {0, 0};
  return version;
}

bool has_since(const Facts& facts, Since since) { return linux_of(facts.machine.kernel) >= since; }

double part_of(uint64_t part, uint64_t whole) {
  return whole == 0 ? 0 : static_cast<double>(part) / static_cast<double>(whole);
}

std::string percent(uint64_t part, uint64_t whole) {
  return fmt::format("{:.0f} %", 100 * part_of(part, whole));
}

std::vector<std::string> missing_capabilities(uint64_t set) {
  std::vector<std::string> missing;
  for (const NeededCapability& needed : needed_capabilities())
    if (!needed.is_in(set)) missing.push_back(fmt::format("{} ({})", needed.name, needed.without));
  return missing;
}

bool may_administer(uint64_t capabilities) {
  return needed_capabilities().front().is_in(capabilities);  // CAP_SYS_ADMIN
}

/// Of memory that a store takes, or will.
uint64_t store_size(const Facts& facts) {
  if (const DaemonFacts* daemon = facts.running())
    return daemon->in_memory ? daemon->store_total : 0;
  return facts.planned_memory;
}

}  // namespace

Finding check_kernel(const Facts& facts) {
  Finding finding{.name = "kernel", .found = "Linux " + facts.machine.kernel};
  if (linux_of(facts.machine.kernel) == Since{0, 0}) {
    finding.found += ", which says nothing of what it can do";
    return finding;
  }
  if (!has_since(facts, kPassthroughSince)) {
    finding.level = Level::kWarn;
    finding.found +=
        " cannot read files by itself (passthrough: 6.9): all bytes go through the daemon";
    finding.advice = "run a kernel of 6.9 or later";
    return finding;
  }
  if (!has_since(facts, kEpochSince)) {
    finding.found +=
        " reads files by itself; names of jobs and checkpoints are looked up each "
        "time (kept from 6.16 on)";
  } else if (!has_since(facts, kPruneSince)) {
    finding.found +=
        " reads files by itself and keeps names; memory of names comes back only "
        "when it runs short (at once from 6.18 on)";
  } else {
    finding.found += " has all that is made use of";
  }
  return finding;
}

Finding check_fuse_device(const Facts& facts) {
  const int error = facts.machine.fuse_error;
  Finding finding{.name = "/dev/fuse", .found = "can be opened"};
  if (error == 0) return finding;
  finding.level = Level::kFail;
  finding.found = std::strerror(error);
  finding.advice = error == EACCES || error == EPERM
                       ? "chmod 666 /dev/fuse lets all users mount; in a container the device "
                         "must also be allowed"
                       : "modprobe fuse, or give the container the device";
  return finding;
}

Finding check_rights(const Facts& facts) {
  const DaemonFacts* daemon = facts.running();
  Finding finding{.name = "rights"};
  if (daemon != nullptr ? daemon->user == 0 : facts.machine.is_root) {
    const auto missing =
        missing_capabilities(daemon != nullptr ? daemon->capabilities : facts.machine.capabilities);
    if (missing.empty()) {
      finding.found = "root, with all capabilities that ptcfs needs";
      return finding;
    }
    finding.level = Level::kWarn;
    finding.found = fmt::format("root without {}", fmt::join(missing, ", "));
    finding.advice = "give the service or the container these capabilities";
    return finding;
  }
  finding.found = fmt::format(
      "not root: no passthrough, and no tmpfs of its own; others may {}be let in (allow_other)",
      facts.machine.user_allow_other ? "" : "not ");
  if (daemon == nullptr && !facts.machine.has_fusermount) {
    finding.level = Level::kFail;
    finding.found = "users but root need fusermount3, which is not installed";
    finding.advice = "install it (Debian: fuse3), or mount as root";
  } else if (!facts.machine.user_allow_other && (daemon == nullptr || daemon->allow_other)) {
    finding.level = Level::kWarn;
    finding.advice =
        "for -o allow_other, let root put the line user_allow_other into "
        "/etc/fuse.conf";
  }
  return finding;
}

Finding check_passthrough(const Facts& facts) {
  const DaemonFacts* daemon = facts.running();
  Finding finding{.name = "passthrough"};
  const bool may =
      may_administer(daemon != nullptr ? daemon->capabilities : facts.machine.capabilities);
  if (daemon != nullptr && daemon->passthrough) {
    finding.found = "on";
    return finding;
  }
  const bool has = has_since(facts, kPassthroughSince);
  if (daemon == nullptr && has && may) {
    finding.found = "can be had";
    return finding;
  }
  finding.level = Level::kWarn;
  finding.found = daemon != nullptr ? "off: all bytes go through the daemon"
                                    : "cannot be had: all bytes will go through the daemon";
  finding.advice = !has   ? "it needs Linux 6.9"
                   : !may ? "it needs CAP_SYS_ADMIN: mount as root"
                          : "the store's file system does not allow it, as overlayfs does not: "
                            "give another --store; the daemon's log has the reason";
  return finding;
}

Finding check_io_uring(const Facts& facts) {
  const DaemonFacts* daemon = facts.running();
  Finding finding{.name = "io_uring"};
  const bool wanted = daemon != nullptr && daemon->wants_uring;
  const bool offered = facts.machine.enable_uring.starts_with('Y');
  finding.found = offered ? "offered by the kernel" : "not offered by the kernel";
  if (!wanted) finding.found += ", and not asked for (--io-uring)";
  if (offered || !wanted) return finding;
  finding.level = Level::kWarn;
  finding.found += ", though --io-uring asks for it";
  finding.advice = has_since(facts, kUringSince)
                       ? "echo Y > /sys/module/fuse/parameters/enable_uring, and mount again"
                       : "it needs Linux 6.14";
  return finding;
}

Finding check_memory(const Facts& facts) {
  const MachineFacts& machine = facts.machine;
  const DaemonFacts* daemon = facts.running();
  Finding finding{.name = "memory",
                  .found = fmt::format("{} available of {}", format_size(machine.memory_available),
                                       format_size(machine.memory_total))};
  const uint64_t size = store_size(facts);
  if (size == 0) return finding;
  finding.found += fmt::format("; the store may have {}", format_size(size));
  const uint64_t left = size - std::min(size, daemon != nullptr ? daemon->store_used : 0);
  if (size > machine.memory_total) {
    finding.level = Level::kWarn;
    finding.found +=
        ", which is more than there is: the rest goes to swap, or the kernel ends "
        "processes";
    finding.advice = "give a smaller --memory";
  } else if (left > machine.memory_available) {
    finding.level = Level::kWarn;
    finding.found += fmt::format(", and would take {} more than is available now",
                                 format_size(left - machine.memory_available));
    finding.advice = "give a smaller --memory, or see what else takes memory";
  }
  return finding;
}

Finding check_group_memory(const Facts& facts) {
  const DaemonFacts* daemon = facts.running();
  const auto& group = daemon != nullptr ? daemon->groups.memory : facts.machine.groups.memory;
  Finding finding{.name = "group memory", .found = "no limit by a control group"};
  if (!group) return finding;
  finding.found =
      fmt::format("a control group may have {} ({})", format_size(group->limit), group->group);
  const uint64_t size = store_size(facts);
  if (size > group->limit) {
    finding.level = Level::kFail;
    finding.found += fmt::format(
        ", and the store is larger ({}): when it fills, the kernel ends processes of the group",
        format_size(size));
    finding.advice = "raise MemoryMax or the container's limit, or give a smaller --memory";
  } else if (part_of(group->used, group->limit) > 0.95) {
    finding.level = Level::kWarn;
    finding.found += ", and " + percent(group->used, group->limit) + " is taken";
    finding.advice = "raise MemoryMax or the container's limit";
  }
  return finding;
}

Finding check_swap(const Facts& facts) {
  const MachineFacts& machine = facts.machine;
  Finding finding{.name = "swap", .found = "none"};
  if (machine.swap_total == 0) return finding;
  finding.found =
      fmt::format("{} of {} used", format_size(machine.swap_used), format_size(machine.swap_total));
  if (machine.swap_used < kSwapThatCounts || store_size(facts) == 0) return finding;
  finding.level = Level::kWarn;
  finding.found += ": what of the state lies there is read at the speed of a disk";
  finding.advice = "swapoff -a where memory suffices, vm.swappiness=1, or a smaller --memory";
  return finding;
}

Finding check_overcommit(const Facts& facts) {
  const MachineFacts& machine = facts.machine;
  Finding finding{.name = "overcommit",
                  .found = fmt::format("vm.overcommit_memory is {}", machine.overcommit)};
  if (machine.overcommit != 2) return finding;
  finding.level = Level::kWarn;
  finding.found += fmt::format(": files in memory count against {}, of which {} is promised",
                               format_size(machine.commit_limit), format_size(machine.committed));
  finding.advice = "sysctl vm.overcommit_memory=0, or a larger vm.overcommit_ratio";
  return finding;
}

Finding check_huge_pages(const Facts& facts) {
  const std::string& mode = facts.machine.shmem_enabled;
  Finding finding{.name = "huge pages", .found = "files in memory may have them"};
  if (!mode.empty() && mode != "deny") return finding;
  finding.level = Level::kWarn;
  finding.found = mode.empty() ? "this kernel has none for files in memory: reading is slower"
                               : "denied to files in memory: reading is slower";
  finding.advice = mode.empty() ? "a kernel with CONFIG_TRANSPARENT_HUGEPAGE"
                                : "echo never > /sys/kernel/mm/transparent_hugepage/shmem_enabled "
                                  "(tmpfs that asks for them then has them)";
  return finding;
}

Finding check_open_files(const Facts& facts) {
  const DaemonFacts* daemon = facts.running();
  const uint64_t limit =
      daemon != nullptr ? daemon->open_files_limit : facts.machine.open_files_limit;
  Finding finding{.name = "open files", .found = fmt::format("at most {}", limit)};
  if (daemon != nullptr) finding.found += fmt::format(", {} are open", daemon->open_files);
  const bool nearly = daemon != nullptr && part_of(daemon->open_files, limit) > 0.8;
  if (limit >= kFewFiles && !nearly) return finding;
  finding.level = limit < kTooFewFiles ? Level::kFail : Level::kWarn;
  finding.found += ": users get \"Too many open files\" when they run out";
  finding.advice = "LimitNOFILE=infinity in the unit, or ulimit -Hn before ptcfs is started";
  return finding;
}

Finding check_threads(const Facts& facts) {
  const DaemonFacts* daemon = facts.running();
  const auto& group = daemon != nullptr ? daemon->groups.threads : facts.machine.groups.threads;
  Finding finding{.name = "threads", .found = "no limit by a control group"};
  if (!group) return finding;
  finding.found =
      fmt::format("a control group may have {}, {} are there", group->limit, group->used);
  if (group->limit >= kFewThreads && part_of(group->used, group->limit) < 0.8) return finding;
  finding.level = Level::kWarn;
  finding.found += ": requests that wait for others are refused when they run out";
  finding.advice = "a larger TasksMax, or pids limit of the container";
  return finding;
}

Finding check_mappings(const Facts& facts) {
  const DaemonFacts* daemon = facts.running();
  const uint64_t limit = facts.machine.mappings_limit;
  Finding finding{.name = "mappings", .found = fmt::format("vm.max_map_count is {}", limit)};
  if (limit == 0) finding.found = "vm.max_map_count is not known";
  if (daemon != nullptr) finding.found += fmt::format(", the daemon has {}", daemon->mappings);
  const bool nearly = daemon != nullptr && part_of(daemon->mappings, limit) > 0.8;
  if (limit == 0 || (limit >= kUsualMappings && !nearly)) return finding;
  finding.level = Level::kWarn;
  finding.advice = fmt::format("sysctl vm.max_map_count={}", std::max(2 * limit, kUsualMappings));
  return finding;
}

Finding check_daemon(const Facts& facts) {
  Finding finding{.name = "daemon"};
  if (!facts.daemon) {
    finding.found = facts.mounts.empty()
                        ? "no ptcfs is mounted here: this is of the machine alone"
                        : fmt::format("there are {} mounts of ptcfs: {}", facts.mounts.size(),
                                      fmt::join(facts.mounts, ", "));
    if (facts.mounts.empty()) return finding;
    finding.level = Level::kWarn;
    finding.advice = "name one: ptc doctor " + shell_word(facts.mounts.front());
    return finding;
  }
  const DaemonFacts& daemon = *facts.daemon;
  const std::string where = shell_word(daemon.mount_point);
  using enum DaemonFacts::State;
  finding.level = Level::kFail;
  switch (daemon.state) {
    case kThere:
      finding.level = Level::kOk;
      finding.found = fmt::format("ptcfs {}, process {}, serves {}", daemon.version, daemon.pid,
                                  daemon.mount_point);
      break;
    case kNotMounted:
      finding.found = fmt::format("no ptcfs is mounted on {}", daemon.mount_point);
      finding.advice = "ptcfs … " + where;
      break;
    case kGone:
      finding.found = fmt::format("the daemon behind {} is gone", daemon.mount_point);
      finding.advice = fmt::format(
          "see its log, or the kernel's (dmesg), for why; start it again (ptcfs … {}): the store "
          "is "
          "found again",
          where);
      break;
    case kSilent:
      finding.found = fmt::format("the daemon behind {} does not answer", daemon.mount_point);
      finding.advice = "is it stopped, or the machine out of memory? Its processes: pgrep -a ptcfs";
      break;
    case kUnreadable:
      finding.found = daemon.trouble;
      finding.advice = "ask as the user who has mounted it, or as root";
      break;
    case kOld:
      finding.level = Level::kWarn;
      finding.found =
          fmt::format("{} of {} does not tell of itself", daemon.version, daemon.mount_point);
      finding.advice = "mount it with this version";
      break;
  }
  return finding;
}

Finding check_space(const Facts& facts) {
  const DaemonFacts* daemon = facts.running();
  Finding finding{.name = "store", .found = "none"};
  if (daemon == nullptr) return finding;
  finding.found = fmt::format("{} of {} used, {}", format_size(daemon->store_used),
                              format_size(daemon->store_total), daemon->store);
  const double used = part_of(daemon->store_used, daemon->store_total);
  if (used < 0.9) return finding;
  finding.level = used < 0.98 ? Level::kWarn : Level::kFail;
  finding.found += fmt::format(": {} full", percent(daemon->store_used, daemon->store_total));
  finding.advice = daemon->in_memory
                       ? "remove checkpoints (ptc rm), or mount with a larger --memory"
                       : "remove checkpoints (ptc rm), or make room on that file system";
  return finding;
}

Finding check_leftovers(const Facts& facts) {
  Finding finding{.name = "leftovers", .found = "none"};
  std::vector<std::string> found, advice;
  for (const std::string& path : facts.dead_mounts) {
    found.push_back(fmt::format("{} is a dead mount", path));
    advice.push_back(fmt::format("umount -l {}", shell_word(path)));
  }
  for (const StoreFacts& store : facts.unused_stores) {
    found.push_back(
        fmt::format("{} holds {} that no daemon uses", store.directory, format_size(store.used)));
    const std::string where = shell_word(store.mount_point);
    advice.push_back(
        fmt::format("ptcfs {} has it again, ptcfs --discard {} gives it back", where, where));
  }
  if (found.empty()) return finding;
  return {Level::kWarn, finding.name, fmt::format("{}", fmt::join(found, ", ")),
          fmt::format("{}", fmt::join(advice, "; "))};
}

std::vector<Finding> check_all(const Facts& facts) {
  std::vector<Finding> findings{
      check_kernel(facts),       check_fuse_device(facts), check_rights(facts),
      check_passthrough(facts),  check_io_uring(facts),    check_memory(facts),
      check_group_memory(facts), check_swap(facts),        check_overcommit(facts),
      check_huge_pages(facts),   check_open_files(facts),  check_threads(facts),
      check_mappings(facts),     check_clock(facts),       check_daemon(facts)};
  if (facts.running() != nullptr) findings.push_back(check_space(facts));
  findings.push_back(check_versions(facts));
  if (facts.in_cluster && facts.running() != nullptr) {
    findings.push_back(check_nodes(facts));
    findings.push_back(check_node_clocks(facts));
    findings.push_back(check_agreement(facts));
  }
  for (const EtcdFacts& etcd : facts.etcd) findings.push_back(check_etcd(etcd, facts));
  for (const CertificateFacts& certificate : facts.certificates)
    findings.push_back(check_certificate(certificate, facts.now));
  findings.push_back(check_leftovers(facts));
  return findings;
}

}  // namespace ptc::cli
