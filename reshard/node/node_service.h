// What keeps a node of a cluster from its service, as far as it knows itself, and how it gets on
// with the agreement store: for those that ask every few seconds, whatever is away just then.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "store/meta/meta_client.h"

namespace ptc {

class Cluster;
class Follower;

/// How this node gets on with the agreement store.
struct AgreementNumbers {
  double lease_left_seconds = 0;  // at least so long the lease goes on; 0: it may have ended
  uint64_t lease_losses = 0;      // since the start
  MetaNumbers asked;
};

/// Reasons; each empty where there is none.
struct NodeService {
  std::string lease;      // it is no member
  std::string agreement;  // what is agreed on is not believed, or not read
  std::string drain;      // it shall hold nothing
  AgreementNumbers numbers;
};

/// nullopt: a cluster of one. Asks nobody, and waits for nothing. Threads: any.
std::optional<NodeService> service_of(const Cluster& cluster, const Follower& follower,
                                      const MetaClient& meta);

}  // namespace ptc
