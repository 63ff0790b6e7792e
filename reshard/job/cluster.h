// What a job needs to know of the other nodes, and how it talks to them.
#pragma once

#include <chrono>
#include <memory>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "store/base/error.h"
#include "store/meta/meta_client.h"

namespace ptc {

/// Threads: any.
class Cluster {
 public:
  virtual ~Cluster() = default;

  virtual const std::string& self() const = 0;
  /// Nodes whose lease has not ended, this one among them while that holds for it, by name.
  virtual std::vector<std::string> alive() const = 0;
  /// Asks another node. Its own errors come back as they are; kUnavailable when it cannot be reached.
  virtual Result<std::string> call(const std::string& node, std::string_view method,
                                   const std::string& body, std::chrono::milliseconds deadline,
                                   std::stop_token stop = {}) = 0;
  /// Every decision of this node names it: it fails once the node's lease has ended.
  virtual MetaTransaction::Compare fence() const = 0;
  /// The same of another node, as it is now: a decision that rests on what that node has made names
  /// what this said before the node was asked, for one that was started anew has thrown that away.
  virtual MetaTransaction::Compare fence_of(const std::string& node) const = 0;
  /// The lease that what a node does, and only while it lives, is put under; null: it is no member.
  virtual std::shared_ptr<const MetaLease> lease() const = 0;
};

/// kUnavailable where this node is cut off from its cluster, before anything is asked of that; null: it
/// is alone, and decides always.
Result<> check_member(const Cluster* cluster);
/// A decision: fails once this node's lease has ended, at once where that is known.
Result<int64_t> commit_fenced(MetaClient& meta, const Cluster* cluster, MetaTransaction transaction);

}  // namespace ptc
