// The MetaClient of a cluster: etcd, through the JSON gateway that every member serves.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "store/meta/meta_client.h"
#include "store/net/io_threads.h"

namespace ptc {

struct EtcdOptions {
  std::vector<std::string> endpoints;  // "http://10.0.0.1:2379", all https:// for TLS
  std::string cluster = "ptcfs";  // keys lie below "/ptcfs/"; clusters see nothing of each other
  std::string credentials_file;   // one line "user:password", mode 0600; empty: none
  std::string ca_file;            // PEM; empty: the authorities that the system trusts
  std::string certificate_file;   // PEM, with key_file (mode 0600); empty: none
  std::string key_file;
  std::chrono::milliseconds request_timeout{2000};  // after which the next endpoint is tried
  std::chrono::milliseconds patience{10000};        // after which a call fails
  std::shared_ptr<IoThreads> io =
      nullptr;  // that wait for watches and leases; null: some of its own, started when needed
};

/// Connects, so that wrong addresses and passwords are told at once: kInvalidArgument,
/// kPermissionDenied, kUnavailable.
///
/// Threads: as MetaClient says; a call blocks its thread for at most the patience. Reads are
/// linearizable: they fail on a member that is cut off, and go to another one.
///
/// What happened to a commit whose answer was lost is found out: each one also writes a key of its
/// own, and whoever must know forbids that key first. Done: commit() returns its revision. Not
/// done: it is tried again. Only if etcd stays away for the rest of the patience, commit() returns
/// kInDoubt, and settle(), or a later commit, finds it out. A commit writes and compares 100 keys
/// at most, 1.25 MiB in all.
Result<std::unique_ptr<MetaClient>> open_etcd_meta(const EtcdOptions& options);

}  // namespace ptc
