// Leases of etcd, each kept alive by a coroutine.
#pragma once

#include <functional>
#include <memory>

#include "store/meta/etcd_gateway.h"
#include "store/net/io_threads.h"

namespace ptc {

/// Threads that wait for the network, started where there are none yet. Threads: any.
using NeededIo = std::function<Result<std::shared_ptr<IoThreads>>()>;

/// Renews every lease when a third of its time is over, through whichever endpoint answers.
/// A lease whose deadline passed while etcd was away may come alive again: etcd, itself away, did
/// not end it. One that etcd ended never does.
class EtcdLeases {
 public:
  EtcdLeases(std::shared_ptr<const EtcdAccess> access, NeededIo io);

  Result<std::unique_ptr<MetaLease>> grant(std::chrono::seconds ttl);

 private:
  class Lease;

  EtcdGateway gateway_;
  NeededIo io_;
};

}  // namespace ptc
