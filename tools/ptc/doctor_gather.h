// Finds what doctor_facts.h holds. Nothing here waits for long for a daemon, a file system or an
// etcd that does not answer, and nothing is changed.
#pragma once

#include <chrono>
#include <future>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "store/base/error.h"
#include "store/meta/etcd_meta.h"
#include "tools/ptc/doctor_facts.h"

namespace ptc::cli {

/// What `look` returns; nullopt: it takes longer. Then its thread is left behind: what hangs in the
/// kernel cannot be ended but by the end of the process.
template <class Look>
auto within(std::chrono::milliseconds patience, Look look) -> std::optional<decltype(look())> {
  std::packaged_task<decltype(look())()> task(std::move(look));
  auto result = task.get_future();
  std::thread(std::move(task)).detach();
  if (result.wait_for(patience) != std::future_status::ready) return std::nullopt;
  return result.get();
}

MachineFacts gather_machine();

/// What the daemon was started with, as far as it is of use here.
struct DaemonOptions {
  EtcdOptions etcd;
  std::string tls_ca, tls_certificate;
};
struct MountReport {
  DaemonFacts daemon;
  DaemonOptions options;
  std::string agreement;
  std::vector<NodeFacts> nodes;
};
/// Of the mount on `mount_point` (absolute).
MountReport gather_mount(const std::string& mount_point);

/// Mount points of type fuse.ptcfs, each once.
std::vector<std::string> mount_points();
/// Those of them whose daemon is gone.
std::vector<std::string> dead_mounts();
/// Stores below /run/ptcfs, or of this user in /dev/shm, that no daemon has.
std::vector<StoreFacts> unused_stores();

/// Each endpoint, all at once. kInvalidArgument: what is wrong with the options.
Result<std::vector<EtcdFacts>> gather_etcd(const EtcdOptions& options);
/// What an endpoint that has TLS shows.
CertificateFacts shown_certificate(const std::string& endpoint);
/// `pid`: of the daemon that has the file, perhaps in a container; 0: none.
CertificateFacts read_certificates(std::string option, const std::string& path, bool is_authority,
                                   uint64_t pid);

}  // namespace ptc::cli
