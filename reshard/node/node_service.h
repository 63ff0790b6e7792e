// What keeps a node of a cluster from its service, as far as it knows itself: for those that ask
// every few seconds, whatever is away just then.
#pragma once

#include <optional>
#include <string>

namespace ptc {

class Cluster;
class Follower;

/// Reasons; each empty where there is none.
struct NodeService {
  std::string lease;      // it is no member
  std::string agreement;  // what is agreed on is not believed, or not read
  std::string drain;      // it shall hold nothing
};

/// nullopt: a cluster of one. Asks nobody, and waits for nothing. Threads: any.
std::optional<NodeService> service_of(const Cluster& cluster, const Follower& follower);

}  // namespace ptc
