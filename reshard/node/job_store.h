// All jobs of a node, over one store directory:
//
//   <store>/identity.json                            which store this is, and whose
//     (store_identity.h)
//   <store>/meta.db                                  what exists (embedded metadata of a store that
//     is alone)
//   <store>/agreed.jsonl                             in a cluster: a copy of what is agreed on
//     (agreed_facts.h)
//   <store>/images/<id>                              tensor bytes, immutable
//   <store>/jobs/<job>/id                            which job of that name
//   <store>/jobs/<job>/events.jsonl                  what has happened to it (job_events.h)
//   <store>/jobs/<job>/files/                        what users write: incoming/, editors' files
//   <store>/jobs/<job>/checkpoints/<id>/             manifest.json, headers.bin
//
// Of these a job, a checkpoint or an image goes when a tombstone says so (tombstones.h), when a
// later decision has replaced it, or when its own mark says that it never came to a decision. What
// nothing names is kept, and told of.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "reshard/cluster/node_reports.h"
#include "reshard/job/job.h"
#include "reshard/job/scrub.h"
#include "reshard/node/join_jobs.h"
#include "reshard/node/node_service.h"
#include "store/base/error.h"

namespace ptc {

/// What a store that is one node of a cluster has from outside; all of it outlives the store.
struct ClusterServices {
  MetaClient* meta;
  Cluster* cluster;
  std::function<std::unique_ptr<Transport>()> transport;
  std::string name, where;  // of the cluster, and of etcd: for messages
  bool join = false;        // with jobs of its own, though the cluster has some
  /// Called once the store is known to belong to the cluster, with its id, before anything of it is
  /// looked at.
  std::function<Result<>(const std::string& store)> begin;
  /// Called once the store fits, before anything of it is agreed on: whether others would talk to
  /// this node, and, where the store is new to the cluster, nobody has its name. May be empty.
  std::function<Result<>(bool is_new)> check_let_in = nullptr;
  JobNames join_as = {};  // names that the jobs of its own get in the cluster
  /// Put around all other transports: what goes from device to device between nodes.
  std::function<std::unique_ptr<Transport>(std::unique_ptr<Transport>)> over_links =
      [](std::unique_ptr<Transport> next) { return next; };
};

struct JobStoreOptions {
  std::string directory;
  std::string node;           // empty: the host's name
  std::string version;        // of this program, as other nodes are told
  unsigned copy_threads = 0;  // 0: as many as cores
  /// None: a cluster of one, with its metadata in `directory`.
  std::optional<ClusterServices> cluster = std::nullopt;
  ScrubRate scrub = {};               // off
  MemoryReserveOptions reserve = {};  // none
  std::shared_ptr<SharedResults> results =
      nullptr;             // of several stores in one process; none: the store's own
  PieceSizes pieces = {};  // of files that nodes give each other
  /// Of this node, in whose memory layouts may be; none: there are none.
  std::shared_ptr<const Devices> devices = nullptr;
  bool reads_damaged = false;  // what is known to be wrong in all copies; else that is EIO
};

/// Threads: any.
class JobStore {
 public:
  /// Opens or creates the store; finishes or takes back what a crash left half-done; resumes
  /// reshards. kBusy when another daemon has it open; kUnavailable, with what to do, when it is not
  /// the store of this cluster, or what is agreed there is not what it has seen
  /// (store_membership.h). `listener` may be null and outlives the store.
  static Result<std::unique_ptr<JobStore>> open(const JobStoreOptions& options,
                                                JobListener* listener);
  ~JobStore();
  /// Before a node leaves its cluster: what was agreed by now is in the store's own copy. From then
  /// on it takes over nothing more.
  void note_last();

  /// A job name: 1 to 255 bytes, UTF-8, no '/', not beginning with '.'.
  /// `attributes`: owners and modes from the beginning. `patience`: for other nodes, and for what
  /// they agree through, whose answers it waits for no longer in all: then it is EAGAIN, and the
  /// same again goes on with it (job_changes.h); 0: as peer_table.h says.
  Result<JobRef> create_job(const std::string& name, const JobAttributes& attributes = {},
                            std::chrono::milliseconds patience = {});
  /// kBusy ("holds 3 checkpoints") unless empty: no checkpoints, nothing in incoming/, no files of
  /// the user's own. `force` removes all of it. `id`: which one, of those that have the name one
  /// after another; empty: any. kNotFound: there is none, or another, which stays. kUnavailable: of
  /// another node it is not known, within `patience`, what it has; EAGAIN: as of create_job().
  Result<> remove_job(std::string_view name, bool force, std::string_view id = {},
                      std::chrono::milliseconds patience = {});
  /// The listener hears, as if another node had done so, that jobs were made or removed.
  void tell_jobs_changed();
  JobRef find(std::string_view name) const;
  std::vector<JobRef> jobs() const;  // by name
  size_t job_count() const;

  /// Empties a node, so that it can be stopped without any loss (drain.h): this returns once that
  /// is decided.
  Result<> drain(const std::string& node);
  /// Takes it into service again.
  Result<> cancel_drain(const std::string& node);
  std::vector<std::string> drained() const;  // by name, as of the last change heard of
  /// Bytes of all checkpoints that lie on the node.
  uint64_t bytes_on(std::string_view node) const;
  /// This node's own; and all nodes by name, those that are away, too. Waits for none but for a
  /// moment (NodeReports::heard).
  NodeNumbers numbers() const;
  std::vector<NodeReport> node_reports() const;
  /// Of the connections between this node and each other.
  std::vector<PeerNumbers> traffic() const;
  /// What no checkpoint has, and so stays on the node: "incoming/base of job llama", and of a job
  /// with many how many more.
  struct Uncommitted {
    std::vector<std::string> found;
    uint64_t names = 0;                  // how many, with those that are not named
    std::vector<std::string> not_asked;  // "job llama: node w1 does not answer"
  };
  Uncommitted uncommitted_on(const std::string& node) const;

  /// What keeps this node from its service; nullopt: a cluster of one. Waits for nothing.
  std::optional<NodeService> service() const;
  /// Why nothing is decided or taken over: the agreement store is not what it was.
  std::optional<std::string> distrusted() const;
  /// What was found at start that neither a decision nor a tombstone names: paths below the
  /// directory, and how many images. It is left as it is.
  std::vector<std::string> kept() const;

  /// Nodes came or went.
  void nodes_changed();
  /// Answers what another node asks (cluster/peer_table.h). kNotFound: the job that it is about was
  /// removed, whether or not another has its name by now.
  Result<std::string> answer(PeerMethod method, std::string_view request);

  const std::string& node() const;
  /// Nodes of the cluster that are there, by name.
  std::vector<std::string> nodes() const;
  ImageStore& images();
  const std::string& directory() const;

 private:
  struct Impl;
  explicit JobStore(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ptc
