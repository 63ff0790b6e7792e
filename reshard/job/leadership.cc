#include "reshard/job/leadership.h"

#include <spdlog/spdlog.h>

namespace ptc {

std::unique_ptr<Leadership> Leadership::take(const JobPlace& place) {
  const Cluster& cluster = *place.services.cluster;
  if (!cluster.shares_decisions()) return std::unique_ptr<Leadership>(new Leadership(place, 0));
  const std::shared_ptr<const MetaLease> lease = cluster.lease();
  if (lease == nullptr) return nullptr;
  const std::string key = place.leader_key();
  // One of this node's own is left where it could not be deleted: nobody leads by it.
  const auto held = place.services.meta->get(key);
  if (held.has_error() || (held.value() && held.value()->value != cluster.self())) return nullptr;
  const auto job = place.existence();
  if (job.has_error()) return nullptr;
  MetaTransaction transaction;
  transaction.compares = {job.value(), {key, held.value() ? held.value()->revision : 0}};
  transaction.leased_puts = {{key, cluster.self()}};
  transaction.lease = lease.get();
  Result<int64_t> led = place.services.meta->commit(transaction);
  if (led.has_error()) return nullptr;
  return std::unique_ptr<Leadership>(new Leadership(place, led.value()));
}

bool Leadership::has_anybody_looked(const JobPlace& place, const std::string& view) {
  const auto said = place.services.meta->get(place.looked_key());
  return said.has_value() && said.value() && said.value()->value == place.id + " " + view;
}

Leadership::~Leadership() {
  if (epoch_ == 0) return;
  Result<int64_t> done = give_back();
  // Of a job that is gone nothing is said: the key would outlive it.
  if (view_ && done.has_error() && done.error().code() == Code::kConflict) {
    view_.reset();
    done = give_back();
  }
  if (done.has_error() && done.error().code() != Code::kConflict)
    spdlog::warn("job {}: another node can lead when the lease of this one ends: {}", place_.name,
                 done.error().message());
}

Result<int64_t> Leadership::give_back() const {
  MetaTransaction transaction;
  const std::shared_ptr<const MetaLease> lease = place_.services.cluster->lease();
  const Result<MetaTransaction::Compare> job = place_.existence();
  if (view_ && lease != nullptr && job.has_value()) {
    transaction.leased_puts = {{place_.looked_key(), place_.id + " " + *view_}};
    transaction.lease = lease.get();
    transaction.compares = {job.value()};
  }
  transaction.compares.push_back({place_.leader_key(), epoch_});  // not a later leader's
  transaction.deletes = {place_.leader_key()};
  return commit_fenced(*place_.services.meta, *place_.services.cluster, std::move(transaction));
}

void Leadership::name_in(JobDecision& decision) const {
  if (epoch_ != 0) decision.rests_on_key(place_.leader_key(), epoch_);
}

}  // namespace ptc
