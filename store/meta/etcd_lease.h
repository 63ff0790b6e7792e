// Leases of etcd, kept alive by one thread of the client.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "store/meta/etcd_gateway.h"

namespace ptc {

/// Renews every lease when a third of its time is over, through whichever endpoint answers.
/// A lease whose deadline passed while etcd was away may come alive again: etcd, itself away, did not
/// end it. One that etcd ended never does.
class EtcdLeases {
 public:
  explicit EtcdLeases(std::shared_ptr<const EtcdAccess> access);
  ~EtcdLeases();

  Result<std::unique_ptr<MetaLease>> grant(std::chrono::seconds ttl);

 private:
  class Lease;

  void run();
  void renew(Lease& lease);
  void end(Lease& lease);

  EtcdGateway renewals_;  // of the thread, so that it can be stopped
  EtcdGateway calls_;
  std::mutex mutex_;  // guards all below, and which leases there are
  std::condition_variable changed_;
  std::set<Lease*> leases_;
  Lease* renewing_ = nullptr;
  bool stopping_ = false;
  std::thread thread_;  // started with the first lease
};

}  // namespace ptc
