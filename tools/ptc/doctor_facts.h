// What `ptc doctor` knows of a machine, of a daemon, and of its cluster. doctor_gather.h finds it,
// doctor_checks.h judges it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "store/base/control_group.h"

namespace ptc::cli {

/// Sizes are bytes.
struct MachineFacts {
  std::string kernel;             // as uname -r has it
  std::string enable_uring;       // the parameter of fuse: "Y", "N"; empty: there is none
  int fuse_error = 0;             // errno of opening /dev/fuse; 0: it can be opened
  bool is_root = false;           // who asks
  bool has_fusermount = false;    // fusermount3
  bool user_allow_other = false;  // in /etc/fuse.conf
  uint64_t capabilities = 0;      // permitted, of who asks
  uint64_t memory_total = 0, memory_available = 0;
  uint64_t swap_total = 0, swap_used = 0;
  int overcommit = 0;  // vm.overcommit_memory
  uint64_t commit_limit = 0, committed = 0;
  std::string shmem_enabled;      // of huge pages: "never", "deny" …; empty: there are none
  GroupLimits groups;             // of who asks
  uint64_t open_files_limit = 0;  // that a daemon started from here can have
  uint64_t mappings_limit = 0;    // vm.max_map_count; 0: not known
  std::optional<bool> clock_synchronised;  // nullopt: the kernel does not say
};

/// What a mount says of itself (.ptc/daemon.json).
struct DaemonFacts {
  enum class State { kThere, kNotMounted, kGone, kSilent, kUnreadable, kOld };
  State state = State::kThere;  // what follows is known of kThere alone, the version also of kOld
  std::string mount_point;
  std::string trouble;  // of kUnreadable: the error
  std::string version, node, store;
  uint64_t pid = 0, user = 0;
  bool in_memory = false;  // its store
  uint64_t store_total = 0, store_used = 0;
  bool passthrough = false, expires_names = false;
  bool wants_uring = false;  // --io-uring on or auto
  bool allow_other = false;
  uint64_t capabilities = 0;  // effective
  uint64_t open_files = 0, open_files_limit = 0, mappings = 0;
  GroupLimits groups;
};

/// One of its cluster, as nodes.json of the mount has it.
struct NodeFacts {
  std::string name, state;                          // up, away, fenced
  std::string version;                              // empty: not said
  std::optional<double> heard_seconds_ago;          // nullopt: it has not answered
  std::optional<double> clock_ahead, clock_within;  // seconds; of others
  bool is_self = false;
};

/// An endpoint of etcd, asked from here.
struct EtcdFacts {
  std::string endpoint;
  std::string trouble;    // it does not answer, or refuses; empty: it reads
  double latency_ms = 0;  // of a linearizable read, the median of some
  std::string version;
  bool has_leader = true;
  uint64_t size = 0, in_use = 0;  // of its database
  uint64_t quota = 0;             // 0: it does not say (before etcd 3.6)
  std::vector<std::string> alarms;
};

/// A file of certificates, or the certificate that a server shows.
struct CertificateFacts {
  std::string option;  // --tls-cert, or the endpoint that shows it
  std::string path;    // empty: it is shown
  std::string trouble;
  bool is_authority = false;  // one that is good is enough
  struct Span {
    int64_t since = 0, until = 0;  // it is good; seconds since 1970
  };
  std::vector<Span> spans;  // of each in it
};

struct StoreFacts {
  std::string directory, mount_point;  // that it was made for
  uint64_t used = 0;
};

struct Facts {
  int64_t now = 0;  // seconds since 1970
  MachineFacts machine;
  uint64_t planned_memory = 0;      // of a store to come: --memory
  std::vector<std::string> mounts;  // that are here, where none was chosen
  std::optional<DaemonFacts> daemon;
  bool in_cluster = false;
  std::string agreement;  // why nothing is decided; empty: no trouble
  std::vector<NodeFacts> nodes;
  std::vector<EtcdFacts> etcd;
  std::vector<CertificateFacts> certificates;
  std::vector<std::string> dead_mounts;
  std::vector<StoreFacts> unused_stores;
  std::string own_version;  // of ptc

  /// A daemon that has said what it is.
  const DaemonFacts* running() const {
    return daemon && daemon->state == DaemonFacts::State::kThere ? &*daemon : nullptr;
  }
};

}  // namespace ptc::cli
