// The command line of ptcfs, and the options that mount(8) gives it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "fs/http/http_server.h"
#include "fs/kernel/fuse_session.h"
#include "fs/mount/store_place.h"
#include "fs/tree/quota.h"
#include "reshard/job/scrub.h"
#include "reshard/node/cluster_node.h"
#include "store/base/error.h"
#include "store/base/json.h"
#include "store/image/memory_reserve.h"
#include "tools/log_format.h"

namespace ptc {

// Exit statuses, as mount(8) has them.
inline constexpr int kUsage = 1, kSystemError = 2, kMountFailure = 32;

struct Options {
  StorePlaceOptions place;
  MountOptions mount;
  std::string node;
  std::optional<uint64_t> cache_bytes;
  ScrubRate scrub{ScrubRate::Kind::kDaily};
  bool reads_damaged = false;
  MemoryReserveOptions reserve{.follows = host_takes_free_memory()};
  std::string gpu = "auto";  // Devices::open()
  std::optional<HttpAddress> http;
  std::string access_log;  // empty: none
  std::vector<std::string> data_roots;
  QuotaLimit quota_user, quota_job;
  std::optional<mode_t> root_mode;  // left out: as it was, at first 0755
  ClusterOptions cluster;           // of a cluster of one: no endpoints of etcd
  LogFormat log_format = LogFormat::kText;
  bool foreground = false;
  bool discard = false;
  bool keep = false;     // a keeper has the mount, and starts daemons that serve it
  bool upgrade = false;  // ask one to start another
  bool upgrade_has_options = false;
};

/// Fills `options`; or says what there is to say (help, a completion, what is wrong) and returns
/// the exit status.
std::optional<int> read_command_line(int argc, char** argv, Options* options);

/// For .ptc/daemon.json: what was given or follows from it, as text, numbers and lists by the
/// options' names. Files that hold secrets are there by their names.
json::object options_report(const Options& options);

/// "ptcfs: …" on stderr; returns `status`.
int complain(const Error& error, int status);

}  // namespace ptc
