// Which nodes were ever there, and since when each is there or not: keys seen/<node>, which outlive
// the leases.
//
// A node that joins puts its own, in the same transaction. That one is gone is noted by one of
// those that are there, the next by name, so that n nodes do not all write when one dies; the
// others hear of it by the watch. A key is so written only when its node comes or goes.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "reshard/cluster/cluster.h"
#include "store/base/mutex.h"
#include "store/meta/meta_client.h"

namespace ptc {

/// Threads: any.
class SeenNodes {
 public:
  /// Follows what is noted. `meta` outlives this object.
  static Result<std::unique_ptr<SeenNodes>> open(MetaClient& meta);
  ~SeenNodes();

  /// What the transaction puts with which a node joins.
  static std::pair<std::string, std::string> joined(const std::string& node);
  /// Notes of those that are gone, and of which this node is to see to that, that they are; and
  /// forgets, for all, those that have been gone for a week. `there`: members, by name, as
  /// `cluster` has just found. Does nothing where this node is none of them.
  Result<> update(const Cluster& cluster, const std::vector<std::string>& there);
  std::vector<Cluster::Seen> all() const;  // by name

 private:
  explicit SeenNodes(MetaClient& meta) : meta_(meta) {}
  Result<> list();
  void take(const std::string& key, const std::string* value, int64_t revision);
  /// Until that is so, or it is there again.
  Result<> note_gone(const Cluster& cluster, const std::string& node);

  struct Known {
    Cluster::Seen seen;
    int64_t revision = 0;  // of what says so, or took it away
    bool removed = false;
  };
  MetaClient& meta_;
  std::atomic<bool> gap_ = false;  // what is known is listed anew
  mutable Mutex mutex_;
  std::map<std::string, Known> known_ PTC_GUARDED_BY(mutex_);
  std::shared_ptr<void> watch_;  // last
};

}  // namespace ptc
