// How a member of a cluster reaches the others: over TCP in the daemon (node/tcp_calls.h), by calls
// of functions in the clusters of the tests, over the simulated network in the simulator.
#pragma once

#include <chrono>
#include <stop_token>
#include <string>
#include <vector>

#include "reshard/cluster/cluster.h"
#include "store/base/error.h"
#include "store/rpc/peer_numbers.h"

namespace ptc {

/// Threads: any.
class PeerCalls {
 public:
  virtual ~PeerCalls() = default;

  /// Where a member listens, as its key says; and that it is one no more.
  virtual void set(const std::string& node, const std::string& address) = 0;
  virtual void remove(const std::string& node) = 0;

  /// Connects anew to `address`, where `node` shall be, and both prove who they are. Errors:
  /// kPermissionDenied (secret, certificate, cluster); kUnavailable.
  virtual Result<> meet(const std::string& node, const std::string& address) = 0;
  /// Meets several, some at a time, in this order, and each that has let this node in is asked to
  /// meet this one at `own_address` (PeerMethod::kMeet). Results in their order; errors of the
  /// second half say so. Without an own way, by meets_at_once() threads.
  struct Place {
    std::string node, address;
  };
  virtual std::vector<Result<>> meet_all(const std::vector<Place>& others,
                                         const std::string& own_address);
  virtual size_t meets_at_once() const { return 16; }
  /// Asks once. The node's own errors come back as they are; kUnavailable when it cannot be
  /// reached, broken_off() when the connection broke.
  virtual Result<std::string> call(const std::string& node, const PeerRow& row,
                                   const std::string& request, std::chrono::milliseconds time,
                                   std::stop_token stop) = 0;
  /// Several at the same time, with answers in their order: as many at a time as the row says, and
  /// each once more, at once, where the connection broke and the row allows it. The time of each
  /// begins when it is asked. Without an own way, by threads.
  virtual std::vector<Result<std::string>> call_all(const std::vector<Cluster::Question>& questions,
                                                    const PeerRow& row, AskManner manner,
                                                    std::stop_token stop);
  /// Of all connections between this node and others, by node.
  virtual std::vector<PeerNumbers> numbers() const { return {}; }
};

/// Of a node that let this one in.
Result<> check_came_back(const std::string& node, Result<std::string> answer);

}  // namespace ptc
