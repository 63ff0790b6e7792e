// Transactions of etcd whose outcome is known, even when an answer is lost.
//
// Every transaction that writes also puts a marker, "<cluster>/txn/<client>/<number>", which nobody
// else writes, if it does not exist yet, under a lease of the client. When the answer is lost, the
// client puts the marker itself, if it does not exist: if it did, the transaction is done, and its
// revision is the marker's; if not, the transaction can never be done any more, however late it
// arrives. Nor can it once the lease, and so the marker, is gone. Markers of what is done go with a
// later transaction; those that forbid stay for as long as the lease, that is the client.
#pragma once

#include <memory>
#include <vector>

#include "store/base/mutex.h"
#include "store/meta/etcd_gateway.h"
#include "store/meta/etcd_lease.h"

namespace ptc {

/// Threads: any.
class EtcdCommitter {
 public:
  EtcdCommitter(EtcdGateway& gateway, EtcdLeases& leases, std::string cluster_prefix,
                std::string key_prefix);

  /// As MetaClient::commit and settle; the transaction passed check_transaction().
  Result<int64_t> commit(const MetaTransaction& transaction);
  Result<> settle();

 private:
  struct Marker {
    std::string key;
    std::shared_ptr<MetaLease> lease;
  };

  Result<Marker> new_marker();
  void drop_lease(const std::shared_ptr<MetaLease>& lease);
  std::vector<std::string> take_known();
  void add_known(std::vector<std::string> markers);
  Result<int64_t> read_only(const MetaTransaction& transaction);
  json::object request_of(const MetaTransaction& transaction, const Marker& marker,
                          const std::vector<std::string>& known) const;
  json::array compares_of(const MetaTransaction& transaction) const;
  json::array reads_of(const MetaTransaction& transaction) const;
  Error conflict(const MetaTransaction& transaction, const json::object& answer) const;
  /// The revision at which it was done, or nullopt: it was not, and never will be.
  Result<std::optional<int64_t>> forbid(const Marker& marker, Deadline deadline);
  Result<> settle_until(Deadline deadline);

  EtcdGateway& gateway_;
  EtcdLeases& leases_;
  std::string marker_prefix_;
  std::string key_prefix_;
  Mutex settling_;  // before mutex_: who finds doubtful_ empty knows that nobody is at it
  Mutex mutex_;
  std::shared_ptr<MetaLease> lease_ PTC_GUARDED_BY(mutex_);
  uint64_t last_number_ PTC_GUARDED_BY(mutex_) = 0;
  std::vector<std::string> known_
      PTC_GUARDED_BY(mutex_);  // markers of what is known to be done, to be deleted
  std::vector<Marker> doubtful_ PTC_GUARDED_BY(mutex_);
};

}  // namespace ptc
