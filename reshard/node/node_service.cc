#include "reshard/node/node_service.h"

#include "reshard/cluster/cluster.h"
#include "reshard/move/placement.h"
#include "reshard/node/agreement_follower.h"

namespace ptc {

namespace {

double lease_left_seconds(const Cluster& cluster) {
  using Clock = MetaLease::Clock;
  const std::shared_ptr<const MetaLease> lease = cluster.lease();
  if (lease == nullptr) return 0;
  const Clock::time_point now = Clock::now(), deadline = lease->deadline();
  return deadline > now ? std::chrono::duration<double>(deadline - now).count() : 0;
}

}  // namespace

std::optional<NodeService> service_of(const Cluster& cluster, const Follower& follower,
                                      const MetaClient& meta) {
  if (!cluster.shares_decisions()) return std::nullopt;
  NodeService service;
  if (!is_among(cluster.alive(), cluster.self()))
    service.lease =
        "this node does not reach the agreement store (etcd), or has not joined again; it decides "
        "nothing, and what it holds can be read";
  if (const std::optional<std::string> why = cluster.distrusted()) service.agreement = *why;
  else service.agreement = follower.behind();
  if (is_among(follower.drained(), cluster.self()))
    service.drain = "this node is drained: nothing new is placed on it (ptc drain --cancel)";
  service.numbers = {lease_left_seconds(cluster), cluster.lease_losses(), meta.numbers()};
  return service;
}

}  // namespace ptc
