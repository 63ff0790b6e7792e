#include "reshard/job/cluster.h"

#include <utility>

namespace ptc {

Result<> check_member(const Cluster* cluster) {
  if (cluster == nullptr) return ok();
  const std::shared_ptr<const MetaLease> lease = cluster->lease();
  if (lease != nullptr && lease->alive()) return ok();
  return make_error(Code::kUnavailable, "node {} is cut off from its cluster, and decides nothing until "
                    "it has joined again: try again then, or on another node", cluster->self());
}

Result<int64_t> commit_fenced(MetaClient& meta, const Cluster* cluster, MetaTransaction transaction) {
  PTC_TRY(check_member(cluster));
  if (cluster != nullptr) transaction.compares.push_back(cluster->fence());
  return meta.commit(transaction);
}

}  // namespace ptc
