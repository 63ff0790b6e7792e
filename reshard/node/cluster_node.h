// This node as a member of a cluster (membership.h): found by the others through etcd, asked and
// asking over TCP.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "reshard/cluster/cluster.h"
#include "reshard/node/job_store.h"
#include "reshard/node/join_jobs.h"
#include "reshard/node/node_links.h"
#include "store/base/error.h"
#include "store/meta/etcd_meta.h"
#include "store/rpc/credentials.h"
#include "store/rpc/peer_numbers.h"

namespace ptc {

struct ClusterOptions {
  std::string node;       // this node's name
  std::string listen;     // "host:port" for other nodes
  std::string advertise;  // where they find it; empty: as it listens
  EtcdOptions etcd;
  PeerAuth auth;
  bool join = false;              // with jobs of its own, though the cluster has some
  JobNames join_as;               // and the names that these get there
  std::chrono::seconds lease{5};  // a node that is not heard of for so long is gone
  NodeTransport transport = NodeTransport::kAuto;
  std::shared_ptr<const Devices> devices = nullptr;  // of this node; null: none
};

/// kInvalidArgument of a name or an address by which no other node can find this one, with what to
/// do.
Result<> check(const ClusterOptions& options);

/// Threads: any.
class ClusterNode {
 public:
  /// Connects to etcd. Nothing is written there before JobStore::open has found that the store
  /// belongs there.
  static Result<std::unique_ptr<ClusterNode>> start(ClusterOptions options);
  ~ClusterNode();

  /// For JobStore::open; valid as long as this is.
  ClusterServices services();

  /// Answers other nodes from `store` and joins: from here on they see this node. `store` outlives
  /// leave() or this object. Errors say which of the others does not let it in, and why; one that
  /// does not answer is waited for until its lease must have ended. kBusy when another daemon has
  /// the name, and keeps it for a while.
  Result<> join(JobStore& store);
  /// The others see that this node is gone; nothing is answered any more.
  void leave();

  std::string address() const;  // where this node listens; empty before join()

 private:
  struct Impl;
  explicit ClusterNode(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ptc
